"""An example order in which the correct answers alternate, and in which neighbours have similar lengths."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence

from shared.zo.noise import permutation

WINDOW = 8  # batches; with 16 the longest prompts of batches are 2 to 6 % shorter


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


def grouped_by_length(
    order: Sequence[int], answers: Sequence[int], lengths: Sequence[int], batch: int, seed: int, epoch: int
) -> list[int]:
    """Returns an order of one epoch in which the examples of a batch have similar lengths.

    A batch is computed at the length of its longest example. Within a window of up to WINDOW batches, and of at most a
    quarter of all examples, those of each answer are sorted by length, so that each batch has the answers that it had;
    then the batches are shuffled. Epochs are laid end to end, so that a batch may begin in the epoch before.
    """
    begin = -epoch * len(order) % batch
    window = batch * min(WINDOW, max(len(order) // (4 * batch), 1))
    grouped = list(order[:begin])
    for at in range(begin, len(order), window):
        part = order[at : at + window]
        by_answer: dict[int, deque[int]] = defaultdict(deque)
        for index in sorted(part, key=lengths.__getitem__):
            by_answer[answers[index]].append(index)
        similar = [by_answer[answers[index]].popleft() for index in part]
        whole = len(part) // batch
        for number in permutation(seed, epoch, whole):
            grouped += similar[number * batch : (number + 1) * batch]
        grouped += similar[whole * batch :]
    return grouped
