"""The result that a device reports with its trained adapter."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from pydantic import Field, FiniteFloat

from shared.strict_model import StrictModel
from shared.zo.trajectory import Evaluation

Phase = Literal["compiling", "downloading", "loading", "evaluating", "training", "waiting", "uploading"]


class TextScores(StrictModel):
    """Means over held-out examples, whose continuations were written at temperature 0.

    Of an example with several right texts, each score is the best over them, and `own_words` counts the first.
    """

    examples: int = Field(ge=1)
    exact_match: float = Field(ge=0, le=1, description="share of texts with the same words, by SQuAD's rules")
    token_f1: float = Field(ge=0, le=1, description="F1 of the words, in any order, by SQuAD's rules")
    rouge_l: float = Field(ge=0, le=1, description="F1 of the longest common subsequence of words")
    words: float = Field(ge=0, description="mean number of words written")
    own_words: float = Field(ge=0, description="mean number of words in the person's own texts")


SMALL_SPLIT = 30  # examples; an accuracy on fewer says little


class Result(StrictModel):
    """The metrics that a device reports with its trained adapter: losses in nats, times in seconds, memory in bytes."""

    steps: int = Field(ge=0, description="steps trained")
    best_step: int = Field(ge=0, description="number of steps after which the uploaded B was taken")
    train_seconds: FiniteFloat = Field(ge=0)
    seconds: FiniteFloat = Field(ge=0)
    peak_rss_bytes: int = Field(ge=0, description="peak resident memory of the training process, bytes")
    train_examples: int | None = Field(
        None,
        ge=0,
        description="number of training examples, with those that do not fit the task; null: not reported by private "
        "runs",
    )
    truncated_examples: int | None = Field(
        None,
        ge=0,
        description="training examples whose prompt was cut to the sequence length, rounded down to 0, 1, 10 or 50 %, "
        "with noise of a scale of 10; fewer than 100 count as 0",
    )
    # Omitted unless there are any, so that documents signed before this field existed keep their bytes.
    unusable_examples: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="training examples left out because they do not fit the task, rounded as above; null: 0 or unknown",
    )
    evaluations: tuple[Evaluation, ...] = Field((), max_length=10_000)
    zero_shot_accuracy: float | None = Field(
        None, ge=0, le=1, description="accuracy of the base model alone; null if the run started from an adapter"
    )
    start_accuracy: float | None = Field(
        None, ge=0, le=1, description="accuracy of the start adapter; null if the run started from the base"
    )
    tuned_accuracy: float | None = Field(None, ge=0, le=1)
    accuracy_split: Literal["test", "validation"] | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="on which examples accuracies or token losses were measured; validation: there are no test "
        "examples, and the adapter was chosen on these",
    )
    majority_accuracy: float | None = Field(
        None,
        ge=0,
        le=1,
        exclude_if=lambda value: value is None,
        description="accuracy of always choosing the answer that is most frequent in training, on the same examples",
    )
    baseline_accuracy: float | None = Field(
        None,
        ge=0,
        le=1,
        exclude_if=lambda value: value is None,
        description="accuracy of a logistic regression on hashed n-grams of the prompts, trained on the device on the "
        "same examples as the adapter",
    )
    earlier_accuracy_before: float | None = Field(
        None,
        ge=0,
        le=1,
        exclude_if=lambda value: value is None,
        description="of a job with a start that rehearses: accuracy of the start on held-out records of the earlier "
        "jobs of this device that made it",
    )
    earlier_accuracy_after: float | None = Field(
        None, ge=0, le=1, exclude_if=lambda value: value is None, description="the same of the adapter"
    )
    reference_loss_change: FiniteFloat | None = Field(
        None,
        ge=-1,
        exclude_if=lambda value: value is None,
        description="share by which the loss of public reference texts has changed from the run's start to the adapter "
        "(0.05: it rose by five percent); null: not measured, as in private runs and rounds of cohorts",
    )
    token_loss_before: FiniteFloat | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of a task that writes text, before the first step: -log P of an answer token, nats, the mean over "
        "all answer tokens of the examples; its exponential is the perplexity",
    )
    token_loss_after: FiniteFloat | None = Field(
        None, exclude_if=lambda value: value is None, description="the same of the adapter"
    )
    preference_margin: FiniteFloat | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of a task of kind preference: mean over held-out records of how much more the log-probability of "
        "the preferred answer has risen than the other one's, nats. `tuned_accuracy` is then the share of records of "
        "which it is positive, and the token losses are those of answers that people liked",
    )
    written_before: TextScores | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of a task whose metric compares texts, before the first step: what the model writes for held-out "
        "examples against the examples' own texts",
    )
    written_after: TextScores | None = Field(
        None, exclude_if=lambda value: value is None, description="the same of the adapter"
    )
    phase_seconds: dict[Phase, Annotated[FiniteFloat, Field(ge=0)]] | None = Field(
        None,
        max_length=len(get_args(Phase)),
        exclude_if=lambda value: value is None,
        description="seconds of the device's last attempt by phase, before the upload; null: not reported by private "
        "runs",
    )

    @property
    def perplexities(self) -> tuple[float, float] | None:
        """Perplexity before and after, of a task that writes text; None of preferences, and if it was not measured."""
        if self.token_loss_before is None or self.token_loss_after is None or self.preference_margin is not None:
            return None
        return math.exp(min(self.token_loss_before, 700.0)), math.exp(min(self.token_loss_after, 700.0))

    @property
    def accuracy_interval(self) -> tuple[int, float, float] | None:
        """Number of examples of `tuned_accuracy`, and its 95 % interval (Wilson 1927); None if it is not known."""
        totals = [each.total for each in self.evaluations if each.split == self.accuracy_split]
        if self.tuned_accuracy is None or not totals:
            return None
        total, share, z = totals[-1], self.tuned_accuracy, 1.96
        middle = share + z * z / (2 * total)
        width = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
        scale = 1 + z * z / total
        return total, max((middle - width) / scale, 0.0), min((middle + width) / scale, 1.0)

    @property
    def small_split_note(self) -> str:
        """What to know of an accuracy that was measured on few examples; empty for enough."""
        if self.accuracy_interval is None or self.accuracy_interval[0] >= SMALL_SPLIT:
            return ""
        total, low, high = self.accuracy_interval
        return f"only {total} examples: 95 % interval {low:.0%} to {high:.0%}"

    @property
    def before_accuracy(self) -> float | None:
        """Accuracy before the first step, of the base model or of the adapter that the run started from."""
        return self.zero_shot_accuracy if self.start_accuracy is None else self.start_accuracy
