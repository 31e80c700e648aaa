"""The batch sampler: a step's examples depend only on job seed and step number, so resumed runs see the same batches.

The epochs' orders are laid end to end and cut into batches of E; the epoch's short last batch is filled from the
next epoch, so every step has E examples. Within an epoch the right answers alternate in proportion to their counts:
a batch of one answer only would move the model's overall preference, which is noise in every direction it steps in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.zo.example_order import alternating


@dataclass(frozen=True)
class BatchSampler:
    """The order in which a run visits training examples, `batch` (E) a step. answers: each one's right answer."""

    seed: int
    answers: tuple[int, ...]
    batch: int
    _epochs: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def indices(self, step: int) -> list[int]:
        """The E example indices of one 0-based step."""
        size = len(self.answers)
        places = range(step * self.batch, (step + 1) * self.batch)
        return [self._epoch(place // size)[place % size] for place in places]

    def _epoch(self, epoch: int) -> list[int]:
        """Returns the order of one epoch. The last two are kept: a batch may end in the epoch after its own."""
        if epoch not in self._epochs:
            if len(self._epochs) == 2:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = alternating(self.seed, epoch, self.answers)
        return self._epochs[epoch]
