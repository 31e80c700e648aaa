"""The order in which a run visits its training examples.

A step's batch depends only on job seed and step number, so resumed runs see the same batches. The epochs' orders are
laid end to end and cut into batches of E; the epoch's short last batch is filled from the next epoch, so every step has
E examples. Within an epoch the right answers alternate in proportion to their counts: a batch of one answer only would
move the model's overall preference, which is noise in every direction it steps in. A run that rehearses has two such
orders, one of the new examples and one of those of earlier runs, of which the settings' share of all visits is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.zo.encoding import Example
from shared.zo.example_order import alternating, grouped_by_length


@dataclass(frozen=True)
class BatchSampler:
    """The order in which a run visits training examples, `batch` a step.

    answers, lengths: each one's right answer or group, and its tokens. rehearsed: examples at the end, of which a
    `share` of all visits are. They and the others have epochs of their own.
    """

    seed: int
    answers: tuple[int, ...]
    lengths: tuple[int, ...]
    batch: int
    rehearsed: int = 0
    share: float = 0.0
    _epochs: dict[tuple[range, int], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls, examples: Sequence[Example], seed: int, batch: int, rehearsed: int = 0, share: float = 0.0
    ) -> BatchSampler:
        """Returns the order of these examples. Their lengths are those of prompts: a loss is a mean over all answer
        tokens of a batch, so that batches of short answers would give their tokens more weight.
        """
        groups, lengths = (each.group for each in examples), (len(each.rows[0].prompt) for each in examples)
        return cls(seed, tuple(groups), tuple(lengths), batch, rehearsed, share)

    def indices(self, step: int) -> list[int]:
        """The E example indices of one 0-based step."""
        return [self._index(position) for position in range(step * self.batch, (step + 1) * self.batch)]

    def _index(self, position: int) -> int:
        new, examples = len(self.answers) - self.rehearsed, len(self.answers)
        share = self.share if self.rehearsed else 0.0
        before = int(position * share)  # rehearsed visits
        if int((position + 1) * share) > before:
            return self._visited(range(new, examples), before)
        return self._visited(range(new), position - before)

    def _visited(self, part: range, position: int) -> int:
        """Returns the example at a position, counted from 0 through all epochs of a part of the examples."""
        epoch, at = divmod(position, len(part))
        if (part, epoch) not in self._epochs:
            # The last two are kept: a batch may end in the epoch after its own.
            for old in [each for each in self._epochs if each[0] == part][:-1]:
                del self._epochs[old]
            answers, lengths = (each[part.start : part.stop] for each in (self.answers, self.lengths))
            order = alternating(self.seed, epoch, answers)
            self._epochs[part, epoch] = grouped_by_length(order, answers, lengths, self.batch, self.seed, epoch)
        return part[self._epochs[part, epoch][at]]
