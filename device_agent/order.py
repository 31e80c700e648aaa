"""Which examples a step sees: a function of job seed and step number alone, so a resumed run finds the same batch.

The epochs' orders are laid end to end and cut into batches of E; the epoch's short last batch is filled from the
next epoch, so every step has E examples. Within an epoch the right answers alternate in proportion to their counts:
a batch of one answer only would move the model's overall preference, which is noise in every direction it steps in.
Knows no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shared.order import alternating


@dataclass(frozen=True)
class ExampleOrder:
    """The order in which a run visits training examples, `batch` (E) a step. answers: each one's right answer."""

    seed: int
    answers: tuple[int, ...]
    batch: int

    def indices(self, step: int) -> list[int]:
        """The E example indices of one 0-based step."""
        size = len(self.answers)
        places = range(step * self.batch, (step + 1) * self.batch)
        return [_epoch(self.seed, place // size, self.answers)[place % size] for place in places]


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, answers: tuple[int, ...]) -> list[int]:
    return alternating(seed, epoch, answers)
