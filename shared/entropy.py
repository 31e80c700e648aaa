"""Secret randomness from the operating system: uniform numbers, rounded Gaussian noise and Poisson samples.

Privacy depends on numbers that nobody can predict, so no function takes a seed. Simulations that need reproducible
numbers pass their own source of bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Entropy = Callable[[int], bytes]  # returns that many unpredictable bytes

GAPS_PER_DRAW = 1 << 16  # numbers drawn per call


def uniform(count: int, entropy: Entropy = os.urandom) -> F64:
    """Returns numbers in (0, 1], float64 (count,). Each is made from 64 random bits. The smallest is 2^-65."""
    integers = np.frombuffer(entropy(8 * count), "<u8")
    return (integers.astype(np.float64) + 0.5) * 2.0**-64


def gaussian(count: int, entropy: Entropy = os.urandom) -> F64:
    """Returns standard normal numbers, float64 (count,), by the Box-Muller method.

    Their absolute value is at most 9.5.
    """
    pairs = -(-count // 2)
    u = uniform(2 * pairs, entropy)
    radius, angle = np.sqrt(-2 * np.log(u[:pairs])), 2 * np.pi * u[pairs:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]


def rounded_gaussian(scale: float, count: int, entropy: Entropy = os.urandom) -> F64:
    """Returns normal numbers of standard deviation `scale`, rounded to integers, as float64 (count,).

    Adding them to an integer equals rounding the output of the Gaussian mechanism. Rounding is post-processing, so it
    costs no additional privacy, and no low-order bits of a float leak (Mironov, CCS'12).
    """
    return np.rint(scale * gaussian(count, entropy))


def poisson_samples(
    steps: int, examples: int, rate: float, entropy: Entropy = os.urandom
) -> Iterator[NDArray[np.int64]]:
    """Yields the ascending indices of each step's examples. Each example is included with probability `rate`.

    Instead of one draw per example, the function draws the gaps between included examples, which are geometric.
    """
    if rate >= 1:
        for _ in range(steps):
            yield np.arange(examples, dtype=np.int64)
        return
    total, previous, step = steps * examples, -1, 0
    sample: list[int] = []
    while previous < total:
        gaps = np.floor(np.log(uniform(GAPS_PER_DRAW, entropy)) / np.log1p(-rate))
        positions = previous + np.cumsum(np.minimum(gaps, total) + 1)
        for position in positions.astype(np.int64).tolist():
            previous = position
            while step < min(position // examples, steps):
                yield np.array(sample, np.int64)
                sample, step = [], step + 1
            if step == steps:
                return
            sample.append(position % examples)
