"""A trajectory file that came from elsewhere, read strictly: whole, in order, finite, and of the run it should be of.

The file of one's own run, whose last frame a kill may have torn, is `shared.trajectory`'s. Knows no HTTP and no files.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np
from pydantic import ValidationError

from shared.errors import InvalidTrajectory
from shared.job import Result, TrainingSettings
from shared.proximal import pull_factor
from shared.trajectory import MAGIC, Evaluation, Limits, Trajectory, TrajectoryHeader

_FRAME = struct.Struct("<cII")
_CRC = struct.Struct("<I")
FRAME_BYTES = _FRAME.size + _CRC.size  # of a frame beside its payload
NOTE_BYTES = 512  # most that one evaluation, the header or a change of limits takes
MOST_WORDS = 100  # of what a header says, in an error
FACTOR_TOLERANCE = 2.0**-23  # two roundings of a float32 below 1
SPARE_NOTES = 16  # beside two evaluations for each time the run is measured


def ledger_limit(training: TrainingSettings, numbers: int) -> int:
    """The most bytes of a run's trajectory with so many float32 in a step's frame.

    A device that holds itself back may note new limits at every other step.
    """
    notes = 2 * (training.steps // training.evaluation_interval) + training.steps // 2 + SPARE_NOTES
    return len(MAGIC) + training.steps * (FRAME_BYTES + 4 * numbers) + notes * (FRAME_BYTES + NOTE_BYTES)


def read_ledger(data: bytes) -> Trajectory:
    """The trajectory in `data`. Raises InvalidTrajectory naming what is wrong and at which byte."""
    if not data.startswith(MAGIC):
        raise InvalidTrajectory("the trajectory does not begin as one; send the run's trajectory.bin")
    at = len(MAGIC)
    trajectory: Trajectory | None = None
    while at < len(data):
        kind, step, payload = _frame(data, at)
        try:
            trajectory = _take(trajectory, kind, step, payload)
        except (InvalidTrajectory, ValidationError) as error:
            why = error.detail if isinstance(error, InvalidTrajectory) else "its payload is not of its kind"
            raise InvalidTrajectory(f"the trajectory's frame at byte {at} is wrong: {why}") from error
        at += FRAME_BYTES + len(payload)
    if trajectory is None:
        raise InvalidTrajectory("the trajectory has no header")
    return trajectory


def _frame(data: bytes, at: int) -> tuple[bytes, int, bytes]:
    """Kind, step and payload of the frame at byte `at`."""
    torn = InvalidTrajectory(f"the trajectory breaks off, or is damaged, in its frame at byte {at}; send it again")
    if at + _FRAME.size > len(data):
        raise torn
    kind, step, length = _FRAME.unpack_from(data, at)
    end = at + _FRAME.size + length
    if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != zlib.crc32(data[at:end]):
        raise torn
    return kind, step, data[at + _FRAME.size : end]


def _take(trajectory: Trajectory | None, kind: bytes, step: int, payload: bytes) -> Trajectory:
    """The trajectory with one more frame."""
    if (kind == b"H") != (trajectory is None):
        raise InvalidTrajectory("a trajectory has one header, which comes first")
    if trajectory is None:
        return Trajectory(TrajectoryHeader.model_validate_json(payload))
    if step != trajectory.steps:
        raise InvalidTrajectory(f"it is of step {step} where step {trajectory.steps} belongs")
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
        raise InvalidTrajectory(f"nothing is known of frames of kind {kind!r}")
    return trajectory


def check_run(trajectory: Trajectory, expected: TrajectoryHeader, training: TrainingSettings) -> None:
    """Raises InvalidTrajectory unless it is of the run that `expected` describes, and no longer than that may be."""
    for name in TrajectoryHeader.model_fields:
        said, known = getattr(trajectory.header, name), getattr(expected, name)
        if said != known:
            words = repr(said)[:MOST_WORDS]
            raise InvalidTrajectory(f"the trajectory is of another run: its {name} is {words}, this job's {known!r}")
    if trajectory.steps > training.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps; the job asks for {training.steps}")
    for step, factor in enumerate(trajectory.pulls):
        # To a rounding: the last bit of a cosine schedule's rate is the device's own.
        known = pull_factor(training.lr_at(step), expected.proximal or 0.0)
        if abs(float(factor) - float(known)) > FACTOR_TOLERANCE:
            raise InvalidTrajectory(f"the pull after step {step} has factor {factor:g}; the job's is {known:g}")


def check_result(trajectory: Trajectory, result: Result) -> None:
    """Raises InvalidTrajectory unless it is of the steps that a device reports."""
    if trajectory.steps != result.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps, and the result tells of {result.steps}")
    if result.best_step > result.steps:
        raise InvalidTrajectory(f"the result takes B after step {result.best_step} of {result.steps}")
