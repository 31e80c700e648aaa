"""Accuracy and loss of the current B on one split, by the program's `score`. Knows no journal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from device_agent.errors import Diverged
from device_agent.runtimes import Runtime
from shared.encoding import Example, pack_score
from shared.recipe import Recipe


@dataclass(frozen=True)
class Measured:
    """What one pass over a split found. loss: mean over examples of -log P(right answer | prompt), nats."""

    correct: int
    total: int
    loss: float

    @property
    def accuracy(self) -> float:
        """Share of examples whose right answer scored highest."""
        return self.correct / self.total


def measure(
    runtime: Runtime, examples: Sequence[Example], recipe: Recipe, pulse: Callable[[], None] = lambda: None
) -> Measured:
    """Scores every candidate of every example; the highest log-probability is the answer, the first of equals.

    pulse: called before each batch; what it raises ends the pass. Raises Diverged if a log-probability is no number.
    """
    correct, loss = 0, 0.0
    answers = iter(examples)
    for batch in pack_score(examples, recipe):
        pulse()
        # A batch's scores are in the order of its examples.
        for scores in batch.read(runtime.score(batch.inputs)):
            right = next(answers).correct
            if not all(map(math.isfinite, scores)):
                raise Diverged("training diverged: the adapter's scores are no numbers any more; lower lr")
            correct += max(range(len(scores)), key=scores.__getitem__) == right
            loss -= scores[right]
    return Measured(correct, len(examples), loss / len(examples))
