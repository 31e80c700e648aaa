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
# Evaluations and changes of limits of an uploaded trajectory. A result may have 10,000 evaluations.
MAX_METADATA_FRAMES = 20_000
FRAME_BYTES = _FRAME.size + _CRC.size  # of a frame beside its payload


def read_ledger(data: bytes, most_steps: int | None = None) -> Trajectory:
    """Parses the trajectory in `data`. Raises InvalidTrajectory, naming the problem and its byte offset.

    most_steps: of the run; reading stops as soon as there are more steps, or more than MAX_METADATA_FRAMES other
    frames. Each frame takes about 15 microseconds and 300 bytes of memory, whatever its size.
    """
    if not data.startswith(MAGIC):
        raise InvalidTrajectory("the file is not a trajectory; send the run's trajectory.bin")
    offset = len(MAGIC)
    trajectory: Trajectory | None = None
    while offset < len(data):
        kind, step, payload = _frame(data, offset)
        try:
            trajectory = _append(trajectory, kind, step, payload)
            _check_length(trajectory, most_steps)
        except (InvalidTrajectory, ValidationError) as error:
            reason = error.detail if isinstance(error, InvalidTrajectory) else "its payload is not of its kind"
            raise InvalidTrajectory(f"the trajectory's frame at byte {offset} is invalid: {reason}") from error
        offset += FRAME_BYTES + len(payload)
    if trajectory is None:
        raise InvalidTrajectory("the trajectory has no header")
    return trajectory


def _check_length(trajectory: Trajectory, most_steps: int | None) -> None:
    if most_steps is None:
        return
    if trajectory.steps > most_steps:
        raise InvalidTrajectory(f"it is step {trajectory.steps}; the job has {most_steps}")
    if len(trajectory.evaluations) + len(trajectory.limits) > MAX_METADATA_FRAMES:
        raise InvalidTrajectory(f"it is one of more than {MAX_METADATA_FRAMES} evaluations and changes of limits")


def _frame(data: bytes, offset: int) -> tuple[bytes, int, bytes]:
    """Returns kind, step and payload of the frame at byte `offset`."""
    truncated = InvalidTrajectory(
        f"the trajectory breaks off, or is damaged, in its frame at byte {offset}; send it again"
    )
    if offset + _FRAME.size > len(data):
        raise truncated
    kind, step, length = _FRAME.unpack_from(data, offset)
    end = offset + _FRAME.size + length
    if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[offset:end]):
        raise truncated
    return kind, step, data[offset + _FRAME.size : end]


def _append(trajectory: Trajectory | None, kind: bytes, step: int, payload: bytes) -> Trajectory:
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
        trajectory.append_numbers(numbers)
    elif kind == b"E":
        trajectory.evaluations.append(Evaluation.model_validate_json(payload))
    elif kind == b"L":
        trajectory.limits.append(Limits.model_validate_json(payload))
    else:
        raise InvalidTrajectory(f"unknown frame kind {kind!r}")
    return trajectory
