"""Which examples a step sees: a function of job seed and step number alone, so a resumed run finds the same batch.

The epochs' shuffled orders are laid end to end and cut into batches of E; the epoch's short last batch is
filled from the next epoch, so every step has E examples. Knows no runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shared.noise import permutation


@dataclass(frozen=True)
class ExampleOrder:
    """The order in which a run visits `size` training examples, `batch` (E) a step."""

    seed: int
    size: int
    batch: int

    def indices(self, step: int) -> list[int]:
        """The E example indices of one 0-based step."""
        places = range(step * self.batch, (step + 1) * self.batch)
        return [_epoch(self.seed, place // self.size, self.size)[place % self.size] for place in places]


@lru_cache(maxsize=2)
def _epoch(seed: int, epoch: int, size: int) -> list[int]:
    order: list[int] = permutation(seed, epoch, size).tolist()
    return order
