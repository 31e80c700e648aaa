"""Measures accuracy and loss of the current B on one split with the program's `score` method, or with `score_suffix` on
cached states of the frozen layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from device_agent.errors import Diverged
from device_agent.runtimes import F32, Runtime
from device_agent.training.prefix import PrefixCache, Upcoming
from shared.recipe import Recipe
from shared.zo.encoding import Example, ScoreBatch, pack_score


@dataclass(frozen=True)
class FrozenStates:
    """Where an evaluation takes the frozen layers' states from. reserved: bytes of the cache that it leaves free."""

    cache: PrefixCache
    reserved: int = 0


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
    before_batch: Callable[[], None] = lambda: None,
    *,
    dynamic: bool = False,
    frozen: FrozenStates | None = None,
) -> SplitMetrics:
    """Scores every candidate of every example; the prediction is the candidate with the highest log-probability,
    the first on ties.

    before_batch: its exception ends the measurement. dynamic: the manifest's `dynamic_length`.
    frozen: for a program with `score_suffix`, which then scores. Raises Diverged if a log-probability is not finite.
    """
    log_probabilities: dict[int, list[float]] = {}
    batches = list(score_batches(examples, recipe, dynamic=dynamic))
    upcoming = Upcoming(text for _, batch in batches for text in batch.texts)
    for indices, batch in batches:
        before_batch()
        log_probabilities |= zip(indices, batch.read(_log_probabilities(runtime, batch, frozen, upcoming)), strict=True)
    correct, loss = 0, 0.0
    for index, example in enumerate(examples):
        scores = log_probabilities[index]
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


def _log_probabilities(runtime: Runtime, batch: ScoreBatch, frozen: FrozenStates | None, upcoming: Upcoming) -> F32:
    """Returns the log-probabilities (R, T, C) of one batch."""
    if frozen is None:
        return runtime.score(batch.inputs)
    tokens, *other_inputs = batch.inputs
    rows, length = tokens.shape
    return runtime.score_suffix(
        frozen.cache.hidden(batch.texts, (rows, length), upcoming, frozen.reserved), tuple(other_inputs)
    )
