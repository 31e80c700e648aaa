"""Measures accuracy and loss of the current B on one split with the program's `score` method, or with `score_suffix` on
cached states of the frozen layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from device_agent.errors import Diverged
from device_agent.executors.program import TrainingProgram
from device_agent.training.prefix import PrefixCache, UpcomingTexts, split_prefix
from shared.recipe import Recipe
from shared.zo.encoding import Example
from shared.zo.packing import ScoreBatch, pack_score


@dataclass(frozen=True)
class SplitMetrics:
    """Metrics of one split. loss: mean of -log P(right answer | prompt) over the examples, nats."""

    correct: int
    total: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of examples whose right answer has the highest score."""
        return self.correct / self.total


def measure(
    program: TrainingProgram,
    examples: Sequence[Example],
    recipe: Recipe,
    before_batch: Callable[[], None] = lambda: None,
    *,
    dynamic: bool = False,
    frozen: PrefixCache | None = None,
    reserved: int = 0,
) -> SplitMetrics:
    """Scores every candidate of every example; the prediction is the candidate with the highest log-probability,
    the first on ties.

    before_batch: its exception ends the measurement. dynamic: the manifest's `dynamic_length`.
    frozen: for a program with `score_suffix`, which then scores. reserved: bytes of it that stay free. Raises Diverged
    if a log-probability is not finite.
    """
    log_probabilities: dict[int, list[float]] = {}
    batches = list(score_batches(examples, recipe, dynamic=dynamic))
    upcoming = UpcomingTexts(text for _, batch in batches for text in batch.texts)
    for indices, batch in batches:
        before_batch()
        hidden, inputs = split_prefix(frozen, batch.texts, batch.inputs, upcoming, reserved)
        log_probabilities |= zip(indices, batch.read(program.score(inputs, hidden)), strict=True)
    correct, loss = 0, 0.0
    for index, example in enumerate(examples):
        candidates = log_probabilities[index]
        if not all(map(math.isfinite, candidates)):
            raise Diverged("training diverged: the adapter's scores are NaN or infinite; lower lr")
        correct += max(range(len(candidates)), key=candidates.__getitem__) == example.correct
        loss -= candidates[example.correct]
    return SplitMetrics(correct, len(examples), loss / len(examples))


def score_batches(
    examples: Sequence[Example], recipe: Recipe, *, dynamic: bool
) -> Iterator[tuple[list[int], ScoreBatch]]:
    """Yields the batches for `score`, each with its examples' indices in the split."""
    # A batch costs what its longest sequence does, so those of one length share batches.
    order = sorted(range(len(examples)), key=lambda index: examples[index].length)
    at = 0
    for batch in pack_score([examples[index] for index in order], recipe, dynamic=dynamic):
        yield order[at : at + len(batch.plans)], batch
        at += len(batch.plans)
