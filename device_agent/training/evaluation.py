"""Measures accuracy and loss of the current B on one split with the program's `score` method, or with `score_suffix` on
cached states of the frozen layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from device_agent.errors import Diverged
from device_agent.executors import F32
from device_agent.executors.program import TrainingProgram
from device_agent.training.prefix import PrefixCache, UpcomingTexts, split_prefix
from shared.recipe import PREFERENCE_LOSSES, Recipe
from shared.zo.encoding import Example
from shared.zo.packing import pack_score


@dataclass(frozen=True)
class SplitMetrics:
    """Metrics of one split. loss: mean of -log P(right answer | prompt) over the examples, nats.

    Of preferences, an example is right if its margin is positive (`preference_margins`). margin: the mean, nats. The
    loss is of answers that people liked.
    """

    correct: int
    total: int
    loss: float
    margin: float | None = None

    @property
    def accuracy(self) -> float:
        """Share of examples whose right answer has the highest score."""
        return self.correct / self.total


def best_b(
    program: TrainingProgram,
    examples: Sequence[Example],
    recipe: Recipe,
    candidates: Sequence[F32],
    before_batch: Callable[[], None] = lambda: None,
    *,
    dynamic: bool = False,
) -> int:
    """Returns the index of the B (D,) with the highest accuracy, then the lowest loss, then the lowest index.

    Of preferences, an example is right by what its answers gained from the first B. Loads each into the program.
    Parameters and errors as of `log_probabilities`.
    """
    measured: list[SplitMetrics] = []
    for flat in candidates:
        program.load(flat)
        scores = log_probabilities(program, examples, recipe, before_batch, dynamic=dynamic)
        if not measured and recipe.loss in PREFERENCE_LOSSES:
            examples = [replace(each, reference=tuple(own)) for each, own in zip(examples, scores, strict=True)]
        measured.append(split_metrics(examples, scores, recipe))
    return min(range(len(measured)), key=lambda index: (-measured[index].accuracy, measured[index].loss))


def split_metrics(examples: Sequence[Example], scores: Sequence[Sequence[float]], recipe: Recipe) -> SplitMetrics:
    """Returns the metrics of examples whose candidates have these log-probabilities.

    The prediction is the candidate with the highest one, the first on ties.
    """
    pairs = list(zip(examples, scores, strict=True))
    loss = sum(-candidates[example.correct] for example, candidates in pairs if example.liked) / len(examples)
    if recipe.loss in PREFERENCE_LOSSES:
        margins = preference_margins(examples, scores, recipe)
        return SplitMetrics(int((margins > 0).sum()), len(examples), loss, float(margins.mean()))
    correct = sum(
        max(range(len(candidates)), key=candidates.__getitem__) == example.correct for example, candidates in pairs
    )
    return SplitMetrics(correct, len(examples), loss)


def preference_margins(
    examples: Sequence[Example], scores: Sequence[Sequence[float]], recipe: Recipe
) -> NDArray[np.float64]:
    """Returns how much more each example's preferred answer has gained than the other one, nats (N,).

    An answer's gain is its log-probability minus that before training. With loss kto a record has one answer: the
    margin is its gain above the midpoint between the mean gains of liked and of other answers, or below it if the
    answer was not liked.
    """
    ratios = np.array(scores) - np.array([example.reference for example in examples])  # (N, 2)
    if recipe.loss == "dpo":
        return np.asarray(ratios[:, 0] - ratios[:, 1])
    gains, liked = ratios[:, 0], np.array([example.liked for example in examples])
    midpoint = np.mean([gains[group].mean() for group in (liked, ~liked) if group.any()])
    return np.asarray(np.where(liked, gains - midpoint, midpoint - gains))


def log_probabilities(
    program: TrainingProgram,
    examples: Sequence[Example],
    recipe: Recipe,
    before_batch: Callable[[], None] = lambda: None,
    *,
    dynamic: bool = False,
    frozen: PrefixCache | None = None,
    reserved: int = 0,
) -> list[list[float]]:
    """Returns the log-probability of each candidate of each example, nats.

    before_batch: its exception ends the measurement. dynamic: the manifest's `dynamic_length`.
    frozen: for a program with `score_suffix`, which then scores. reserved: bytes of it that stay free. Raises Diverged
    if a log-probability is not finite.
    """
    scores: dict[int, list[float]] = {}
    # A batch costs what its longest sequence does, so those of one length share batches.
    order = sorted(range(len(examples)), key=lambda index: examples[index].length)
    batches = list(pack_score([examples[index] for index in order], recipe, dynamic=dynamic))
    upcoming, indices = UpcomingTexts(text for batch in batches for text in batch.texts), iter(order)
    for batch in batches:
        before_batch()
        hidden, inputs = split_prefix(frozen, batch.texts, batch.inputs, upcoming, reserved)
        scores |= zip(islice(indices, len(batch.plans)), batch.read(program.score(inputs, hidden)), strict=True)
    if not all(math.isfinite(score) for candidates in scores.values() for score in candidates):
        raise Diverged("training diverged: the adapter's scores are NaN or infinite; lower lr")
    return [scores[index] for index in range(len(examples))]
