"""An order of examples in which the right answers alternate. Knows no batches and no runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.noise import permutation


def alternating(seed: int, epoch: int, answers: Sequence[int]) -> list[int]:
    """All indices, shuffled, the k-th of n examples of an answer at (k + 1/2) / n of the way (ties as shuffled).

    answers: each example's right one. Every stretch of the order has about the whole's proportions of answers.
    """
    shuffled: list[int] = permutation(seed, epoch, len(answers)).tolist()
    total, seen = Counter(answers), Counter[int]()
    way: dict[int, float] = {}
    for index in shuffled:
        answer = answers[index]
        way[index] = (seen[answer] + 0.5) / total[answer]
        seen[answer] += 1
    return sorted(shuffled, key=way.__getitem__)
