"""Strict reader of an uploaded trajectory: complete, in order and finite.

`shared.zo.trajectory` reads the file of the device's own run, whose last frame may be incomplete after a crash.
`shared.trajectory_checks` checks that a trajectory belongs to the expected run.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from pydantic import ValidationError

from shared.errors import InvalidTrajectory
from shared.zo.trajectory import MAGIC, Evaluation, Limits, Trajectory, TrajectoryHeader

_FRAME = struct.Struct("<cII")
_CRC = struct.Struct("<I")
MOST_NOTES = 20_000  # evaluations and changes of limits of an uploaded trajectory; a result may have 10,000 evaluations
FRAME_BYTES = _FRAME.size + _CRC.size  # of a frame beside its payload


def read_ledger(data: bytes, most_steps: int | None = None) -> Trajectory:
    """Parses the trajectory in `data`. Raises InvalidTrajectory, naming the problem and its byte offset.

    most_steps: of the run; reading stops as soon as there are more steps, or more notes than MOST_NOTES. Each frame
    takes about 15 microseconds and 300 bytes of memory, whatever its size.
    """
    if not data.startswith(MAGIC):
        raise InvalidTrajectory("the file is not a trajectory; send the run's trajectory.bin")
    at = len(MAGIC)
    trajectory: Trajectory | None = None
    while at < len(data):
        kind, step, payload = _frame(data, at)
        try:
            trajectory = _take(trajectory, kind, step, payload)
            _check_length(trajectory, most_steps)
        except (InvalidTrajectory, ValidationError) as error:
            why = error.detail if isinstance(error, InvalidTrajectory) else "its payload is not of its kind"
            raise InvalidTrajectory(f"the trajectory's frame at byte {at} is invalid: {why}") from error
        at += FRAME_BYTES + len(payload)
    if trajectory is None:
        raise InvalidTrajectory("the trajectory has no header")
    return trajectory


def _check_length(trajectory: Trajectory, most_steps: int | None) -> None:
    if most_steps is None:
        return
    if trajectory.steps > most_steps:
        raise InvalidTrajectory(f"it is step {trajectory.steps}; the job has {most_steps}")
    if len(trajectory.evaluations) + len(trajectory.limits) > MOST_NOTES:
        raise InvalidTrajectory(f"it is one of more than {MOST_NOTES} evaluations and changes of limits")


def _frame(data: bytes, at: int) -> tuple[bytes, int, bytes]:
    """Returns kind, step and payload of the frame at byte `at`."""
    torn = InvalidTrajectory(f"the trajectory breaks off, or is damaged, in its frame at byte {at}; send it again")
    if at + _FRAME.size > len(data):
        raise torn
    kind, step, length = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + length
    if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[at:end]):
        raise torn
    return kind, step, data[at + _FRAME.size : end]


def _take(trajectory: Trajectory | None, kind: bytes, step: int, payload: bytes) -> Trajectory:
    """Returns the trajectory with one more frame."""
    if (kind == b"H") != (trajectory is None):
        raise InvalidTrajectory("a trajectory has exactly one header, at its start")
    if trajectory is None:
        return Trajectory(TrajectoryHeader.model_validate_json(payload))
    if step != trajectory.steps:
        raise InvalidTrajectory(f"it has step {step} instead of step {trajectory.steps}")
    if kind == b"S":
        if len(payload) != 4 * trajectory.header.numbers:
            raise InvalidTrajectory(f"{len(payload)} bytes are not the {trajectory.header.numbers} numbers of a step")
        numbers = np.frombuffer(payload, "<f4").astype(np.float32)
        if not np.isfinite(numbers).all():
            raise InvalidTrajectory("a coefficient is not finite")
        trajectory.take(numbers)
    elif kind == b"E":
        trajectory.evaluations.append(Evaluation.model_validate_json(payload))
    elif kind == b"L":
        trajectory.limits.append(Limits.model_validate_json(payload))
    else:
        raise InvalidTrajectory(f"unknown frame kind {kind!r}")
    return trajectory
