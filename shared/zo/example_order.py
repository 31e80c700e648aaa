"""An example order in which the correct answers alternate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shared.zo.noise import permutation


def alternating(seed: int, epoch: int, answers: Sequence[int]) -> list[int]:
    """Returns all indices, shuffled, such that the k-th of n examples of an answer is at (k + 1/2) / n of the sequence.

    answers: each example's correct answer. Ties keep the shuffled order. Every part of the sequence has approximately
    the proportions of answers of the whole data set.
    """
    shuffled: list[int] = permutation(seed, epoch, len(answers)).tolist()
    total, counts = Counter(answers), Counter[int]()
    positions: dict[int, float] = {}
    for index in shuffled:
        answer = answers[index]
        positions[index] = (counts[answer] + 0.5) / total[answer]
        counts[answer] += 1
    return sorted(shuffled, key=positions.__getitem__)
