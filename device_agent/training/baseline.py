"""What simple classifiers reach on the same records: the most frequent answer, and a logistic regression on n-grams.

An adapter that is worse than these has not learned its task. The regression reads the tokens of the whole prompts, also
of those that are cut for the model, in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.zo.encoding import Example
from shared.zo.noise import permutation

BUCKETS = 1 << 16  # of hashed n-grams
NGRAMS = 3  # most tokens of one
MAX_VISITS, MAX_EPOCHS = 40_000, 30  # of training examples
RATE = 4.0  # of the first update; it falls linearly to 0
SEED = 0
_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: a multiplicative hash

Features = tuple[NDArray[np.int64], NDArray[np.float32]]  # buckets of one prompt, and their counts or weights


@dataclass(frozen=True)
class Baseline:
    """Shares of examples that are right: with the most frequent answer of training, and with the regression."""

    majority: float
    ngrams: float


def measure_baseline(train: Sequence[Example], measured: Sequence[Example]) -> Baseline:
    """Trains the regression on examples, and returns the accuracies on others. Both must have at least one."""
    answers = [example.correct for example in train]
    most_frequent = Counter(answers).most_common(1)[0][0]
    majority = sum(example.correct == most_frequent for example in measured) / len(measured)
    features = [_ngrams(example.prompt) for example in train]
    document_counts = np.zeros(BUCKETS)
    for buckets, _ in features:
        document_counts[buckets] += 1
    rarity = np.log((1 + len(train)) / (1 + document_counts)).astype(np.float32)
    weights = _regression([_weighted(each, rarity) for each in features], answers)
    predictions = (_scores(weights, _weighted(_ngrams(example.prompt), rarity)).argmax() for example in measured)
    right = sum(int(answer) == example.correct for answer, example in zip(predictions, measured, strict=True))
    return Baseline(majority, right / len(measured))


def _ngrams(tokens: Sequence[int]) -> Features:
    """Returns the hashed n-grams of up to NGRAMS tokens, and the logarithm of their counts."""
    hashes = np.zeros(len(tokens), np.uint64)
    parts = []
    for size in range(1, min(NGRAMS, len(tokens)) + 1):
        following = np.array(tokens[size - 1 :], np.uint64)
        hashes = (hashes[: len(following)] + following + np.uint64(1)) * np.uint64(_MULTIPLIER)
        parts.append(hashes >> np.uint64(48))
    buckets, counts = np.unique(np.concatenate(parts) if parts else hashes, return_counts=True)
    return buckets.astype(np.int64), np.log1p(counts).astype(np.float32)


def _weighted(features: Features, rarity: NDArray[np.float32]) -> Features:
    """Returns features weighted by their rarity in training, at unit length."""
    buckets, counts = features
    values = counts * rarity[buckets]
    return buckets, values / max(float(np.linalg.norm(values)), 1e-6)


def _scores(weights: NDArray[np.float32], features: Features) -> NDArray[np.float32]:
    buckets, values = features
    scores: NDArray[np.float32] = values @ weights[buckets]
    return scores


def _regression(examples: Sequence[Features], answers: Sequence[int]) -> NDArray[np.float32]:
    """Returns weights (BUCKETS, C) of a multinomial logistic regression, by stochastic gradient descent."""
    weights = np.zeros((BUCKETS, max(answers) + 1), np.float32)
    epochs = min(max(MAX_VISITS // len(examples), 1), MAX_EPOCHS)
    visits = [int(index) for epoch in range(epochs) for index in permutation(SEED, epoch, len(examples))][:MAX_VISITS]
    for number, index in enumerate(visits):
        scores = _scores(weights, examples[index])
        errors = np.exp(scores - scores.max())
        errors /= errors.sum()
        errors[answers[index]] -= 1
        buckets, values = examples[index]
        weights[buckets] -= (RATE * (1 - number / len(visits))) * np.outer(values, errors).astype(np.float32)
    return weights
