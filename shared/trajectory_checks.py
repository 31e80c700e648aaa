"""Whether a trajectory that `shared.zo.trajectory_reader` has read is of a job's run, and how large it may be."""

from __future__ import annotations

from shared.errors import InvalidTrajectory
from shared.job import Result
from shared.training_settings import TrainingSettings
from shared.zo.proximal import pull_factor
from shared.zo.trajectory import MAGIC, Trajectory, TrajectoryHeader
from shared.zo.trajectory_reader import FRAME_BYTES

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


def check_run(trajectory: Trajectory, expected: TrajectoryHeader, training: TrainingSettings) -> None:
    """Raises InvalidTrajectory unless the trajectory belongs to the run in `expected` and is not too long."""
    for name in TrajectoryHeader.model_fields:
        actual, known = getattr(trajectory.header, name), getattr(expected, name)
        if actual != known:
            text = repr(actual)[:MOST_WORDS]
            raise InvalidTrajectory(f"the trajectory is of another run: its {name} is {text}, this job's {known!r}")
    if trajectory.steps > training.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps; the job has {training.steps}")
    for step, factor in enumerate(trajectory.pulls):
        # With a tolerance, because the last bit of a cosine schedule's rate depends on the device.
        known = pull_factor(training.lr_at(step), expected.proximal or 0.0)
        if abs(float(factor) - float(known)) > FACTOR_TOLERANCE:
            raise InvalidTrajectory(f"the pull after step {step} has factor {factor:g}; the job's is {known:g}")


def check_result(trajectory: Trajectory, result: Result) -> None:
    """Raises InvalidTrajectory unless the trajectory has the number of steps that the device reports."""
    if trajectory.steps != result.steps:
        raise InvalidTrajectory(f"the trajectory has {trajectory.steps} steps, but the result reports {result.steps}")
    if result.best_step > result.steps:
        raise InvalidTrajectory(f"the result selects B after step {result.best_step} of {result.steps}")
