"""Measures accuracy and loss of the current B on one split with the program's `score` method."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from device_agent.errors import Diverged
from device_agent.runtimes import Runtime
from shared.recipe import Recipe
from shared.zo.encoding import Example, ScoreBatch, pack_score


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
    runtime: Runtime,
    examples: Sequence[Example],
    recipe: Recipe,
    pulse: Callable[[], None] = lambda: None,
    *,
    dynamic: bool = False,
) -> SplitMetrics:
    """Scores every candidate of every example; the prediction is the candidate with the highest log-probability,
    the first on ties.

    pulse: called before each batch; its exception ends the measurement. dynamic: the manifest's `dynamic_length`.
    Raises Diverged if a log-probability is not finite.
    """
    correct, loss = 0, 0.0
    for example, scores in zip(examples, _scores(runtime, examples, recipe, pulse, dynamic), strict=True):
        if not all(map(math.isfinite, scores)):
            raise Diverged("training diverged: the adapter's scores are no numbers any more; lower lr")
        correct += max(range(len(scores)), key=scores.__getitem__) == example.correct
        loss -= scores[example.correct]
    return SplitMetrics(correct, len(examples), loss / len(examples))


def score_batches(
    examples: Sequence[Example], recipe: Recipe, *, dynamic: bool
) -> Iterator[tuple[list[int], ScoreBatch]]:
    """Yields the batches for `score`, each with its examples' indices in the split."""
    # A batch costs what its longest sequence does, so those of one length share batches.
    order = sorted(range(len(examples)), key=lambda index: examples[index].length)
    at = 0
    for batch in pack_score([examples[index] for index in order], recipe, dynamic=dynamic):
        yield order[at : at + len(batch.cells)], batch
        at += len(batch.cells)


def _scores(
    runtime: Runtime, examples: Sequence[Example], recipe: Recipe, pulse: Callable[[], None], dynamic: bool
) -> list[list[float]]:
    """Returns the log-probability of each candidate of each example."""
    found: dict[int, list[float]] = {}
    for indices, batch in score_batches(examples, recipe, dynamic=dynamic):
        pulse()
        found |= zip(indices, batch.read(runtime.score(batch.inputs)), strict=True)
    return [found[index] for index in range(len(examples))]
