"""Checks that a trajectory read by `shared.zo.trajectory_reader` belongs to a job's run, and limits its size."""

from __future__ import annotations

from shared.errors import InvalidTrajectory
from shared.result import Result
from shared.training_settings import TrainingSettings
from shared.zo.proximal import proximal_factor
from shared.zo.trajectory import MAGIC, Trajectory, TrajectoryHeader
from shared.zo.trajectory_reader import FRAME_BYTES

MAX_METADATA_FRAME_BYTES = 512  # largest header, evaluation or change of limits
MAX_QUOTED = 100  # characters of a header's value in an error message
FACTOR_TOLERANCE = 2.0**-23  # two roundings of a float32 below 1
SPARE_METADATA_FRAMES = 16  # in addition to two evaluations per evaluation interval


def ledger_limit(training: TrainingSettings, values_per_step: int) -> int:
    """Returns the largest size of a run's trajectory, in bytes. values_per_step: float32 values in a step's frame.

    A device that throttles its training may record new limits at every other step.
    """
    metadata_frames = 2 * (training.steps // training.evaluation_interval) + training.steps // 2 + SPARE_METADATA_FRAMES
    return (
        len(MAGIC)
        + training.steps * (FRAME_BYTES + 4 * values_per_step)
        + metadata_frames * (FRAME_BYTES + MAX_METADATA_FRAME_BYTES)
    )


def check_run(trajectory: Trajectory, expected: TrajectoryHeader, training: TrainingSettings) -> None:
    """Raises InvalidTrajectory unless the trajectory belongs to the run in `expected` and is not too long."""
    for name in TrajectoryHeader.model_fields:
        actual, expected_value = getattr(trajectory.header, name), getattr(expected, name)
        if actual != expected_value:
            quoted = repr(actual)[:MAX_QUOTED]
            raise InvalidTrajectory(
                f"the trajectory is of another run: its {name} is {quoted}, this job's {expected_value!r}"
            )
    if trajectory.steps > training.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps; the job has {training.steps}")
    for step, factor in enumerate(trajectory.proximal_factors):
        # With a tolerance, because the last bit of a cosine schedule's rate depends on the device.
        expected_value = proximal_factor(training.lr_at(step), expected.proximal or 0.0)
        if abs(float(factor) - float(expected_value)) > FACTOR_TOLERANCE:
            raise InvalidTrajectory(
                f"the proximal step after step {step} has factor {factor:g}; the job's is {expected_value:g}"
            )


def check_result(trajectory: Trajectory, result: Result) -> None:
    """Raises InvalidTrajectory unless the trajectory has the number of steps that the device reports."""
    if trajectory.steps != result.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps, but the result reports {result.steps}")
    if result.best_step > result.steps:
        raise InvalidTrajectory(f"the result selects B after step {result.best_step} of {result.steps}")
