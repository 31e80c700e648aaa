"""What a finished run amounts to, whatever trained it: the result that is reported, and the adapter that is uploaded.

Knows no runtime and no process.
"""

from __future__ import annotations

from device_agent.errors import Diverged
from device_agent.journal import Figures, RunPlan
from shared.job import Result
from shared.trajectory import Evaluation, Trajectory


def best_validation(trajectory: Trajectory) -> Evaluation | None:
    """Highest validation accuracy, then lowest loss, then fewest steps; None before the first validation."""
    validations = [found for found in trajectory.evaluations if found.split == "validation"]
    return min(validations, key=lambda found: (-found.accuracy, found.loss, found.step), default=None)


def recorded(trajectory: Trajectory, split: str, step: int, adapter: str = "current") -> Evaluation | None:
    """One evaluation of the ledger."""
    key = (split, step, adapter)
    return next((found for found in trajectory.evaluations if (found.split, found.step, found.adapter) == key), None)


def handed_in(plan: RunPlan, trajectory: Trajectory) -> Evaluation | None:
    """The validation of the B that is handed in, once the run is done; None if it was not measured."""
    if plan.hands_in_last:
        return recorded(trajectory, "validation", trajectory.steps)
    return best_validation(trajectory)


def conclude(plan: RunPlan, trajectory: Trajectory, spent: Figures, examples: int, truncated: int) -> Result:
    """The result of a run whose ledger is whole.

    spent: over all its processes. examples, truncated: of the training split. Raises Diverged if no step was ever
    measured, which only a damaged run can show. Of a private run it tells what steps and clock tell anyway.
    """
    if plan.privacy is not None:
        return Result(
            steps=trajectory.steps,
            best_step=trajectory.steps,
            train_seconds=spent.train_seconds,
            seconds=spent.seconds,
            peak_rss_bytes=0,  # it grows with the data
            train_examples=None,
            truncated_examples=None,
        )
    best = handed_in(plan, trajectory)
    if best is None:
        raise Diverged("the run has no validation; remove its directory to train it anew")
    # Without a test split, validation's numbers stand in for it: the tuned one is the best of several, so kind.
    zero = recorded(trajectory, "test", 0)
    tuned: Evaluation | None = best
    if zero is not None:
        tuned = recorded(trajectory, "test", best.step, "best")
    else:
        zero = recorded(trajectory, "validation", 0)
    before = zero and zero.accuracy
    return Result(
        steps=trajectory.steps,
        best_step=best.step,
        train_seconds=spent.train_seconds,
        seconds=spent.seconds,
        peak_rss_bytes=spent.peak_rss_bytes,
        train_examples=examples,
        truncated_examples=truncated,
        evaluations=tuple(trajectory.evaluations),
        zero_shot_accuracy=before if plan.start is None else None,
        start_accuracy=None if plan.start is None else before,
        tuned_accuracy=tuned and tuned.accuracy,
    )
