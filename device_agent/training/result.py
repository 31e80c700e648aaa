"""Derives a finished run's result and the adapter to upload from its trajectory."""

from __future__ import annotations

from device_agent.errors import Diverged
from device_agent.training.baseline import Baseline
from device_agent.training.data import Splits
from device_agent.training.run_directory import ResourceUsage
from device_agent.training.run_plan import RunPlan
from shared.result import Result
from shared.zo.trajectory import Evaluation, Trajectory

# Counts of truncated and unusable records have noise, and are rounded before upload. Noise alone reaches MIN_COUNT,
# 10 of its scales, with a probability of 1 in 40,000.
MIN_COUNT = 100
PERCENTAGES = (1, 10, 50)


def best_validation(trajectory: Trajectory) -> Evaluation | None:
    """Returns the validation with the highest accuracy, then lowest loss, then fewest steps; None before the first
    one.
    """
    validations = [evaluation for evaluation in trajectory.evaluations if evaluation.split == "validation"]
    return min(
        validations, key=lambda evaluation: (-evaluation.accuracy, evaluation.loss, evaluation.step), default=None
    )


def recorded(trajectory: Trajectory, split: str, step: int, adapter: str = "current") -> Evaluation | None:
    """Returns the trajectory's evaluation of a split at a step, or None."""
    key = (split, step, adapter)
    return next(
        (
            evaluation
            for evaluation in trajectory.evaluations
            if (evaluation.split, evaluation.step, evaluation.adapter) == key
        ),
        None,
    )


def loss_change(before: Evaluation | None, after: Evaluation | None) -> float | None:
    """Returns the share by which the loss of the same examples has changed; None if it was not measured twice."""
    if before is None or after is None or before.loss <= 0:
        return None
    return after.loss / before.loss - 1


def out_of_patience(trajectory: Trajectory, patience: int | None) -> bool:
    """Returns whether the last `patience` validations were none better than the one before them; None: never."""
    best = best_validation(trajectory)
    if patience is None or best is None:
        return False
    return (
        sum(evaluation.split == "validation" and evaluation.step > best.step for evaluation in trajectory.evaluations)
        >= patience
    )


def uploaded_validation(plan: RunPlan, trajectory: Trajectory) -> Evaluation | None:
    """Returns the validation of the B that is uploaded; None if it was not measured."""
    if plan.uploads_last:
        return recorded(trajectory, "validation", trajectory.steps)
    return best_validation(trajectory)


def rounded_down(count: int, records: int) -> int:
    """Returns a count of records rounded down to 0, 1, 10 or 50 % of `records`; fewer than MIN_COUNT count as 0."""
    if count < MIN_COUNT:
        return 0
    return max((edge for edge in (-(-records * percent // 100) for percent in PERCENTAGES) if edge <= count), default=0)


def build_result(
    plan: RunPlan, trajectory: Trajectory, usage: ResourceUsage, splits: Splits, baseline: Baseline | None
) -> Result:
    """Returns the result of a run with a complete trajectory.

    usage: of all its processes. baseline: on the same examples as the accuracies.
    Raises Diverged if there is no validation, which only a damaged run lacks. A private run's result contains nothing
    that depends on its data.
    """
    if plan.privacy is not None:
        return Result(
            steps=trajectory.steps,
            best_step=trajectory.steps,
            train_seconds=usage.train_seconds,
            seconds=usage.seconds,
            peak_rss_bytes=0,  # it grows with the data
            train_examples=None,
            truncated_examples=None,
        )
    best = uploaded_validation(plan, trajectory)
    if best is None:
        raise Diverged("the run has no validation; remove its directory to train it anew")
    # Without test examples the accuracies are validation's, on which the adapter was chosen; the result says so.
    tested = recorded(trajectory, "test", 0)
    tuned = best if tested is None else recorded(trajectory, "test", best.step, "best")
    zero = recorded(trajectory, "validation", 0) if tested is None else tested
    earlier = recorded(trajectory, "earlier", 0), recorded(trajectory, "earlier", best.step, "best")
    reference = recorded(trajectory, "reference", 0), recorded(trajectory, "reference", best.step, "best")
    if not plan.task.generates:
        names = ("zero_shot_accuracy" if plan.start is None else "start_accuracy", "tuned_accuracy")
        values = [each and each.accuracy for each in (zero, tuned)]
    else:
        # Losses of texts are divided by their tokens: those of answers that people did not like do not count.
        measured = splits.validation if tested is None else splits.test or ()
        tokens = sum(len(each.correct_row.targets) for each in measured if each.liked)
        names = ("token_loss_before", "token_loss_after")
        values = [each and each.loss * each.total / max(tokens, 1) for each in (zero, tuned)]
    preference = {}
    if plan.task.preference_loss is not None and tuned is not None:
        preference = {"tuned_accuracy": tuned.accuracy, "preference_margin": tuned.margin}
    return Result(
        steps=trajectory.steps,
        best_step=best.step,
        train_seconds=usage.train_seconds,
        seconds=usage.seconds,
        peak_rss_bytes=usage.peak_rss_bytes,
        train_examples=splits.records,
        truncated_examples=rounded_down(splits.truncated, splits.records),
        unusable_examples=rounded_down(splits.unusable, splits.records) or None,
        evaluations=tuple(trajectory.evaluations),
        accuracy_split="validation" if tested is None else "test",
        majority_accuracy=None if baseline is None else baseline.majority,
        baseline_accuracy=None if baseline is None else baseline.ngrams,
        earlier_accuracy_before=earlier[0] and earlier[0].accuracy,
        earlier_accuracy_after=earlier[1] and earlier[1].accuracy,
        reference_loss_change=loss_change(*reference),
        **dict(zip(names, values, strict=True)),
        **preference,
    )
