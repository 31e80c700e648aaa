"""Secret randomness from the operating system: uniform numbers, rounded Gaussian noise, Poisson samples.

What protects privacy must not follow from a seed that anybody else knows, so nothing here takes one: whoever wants the
same numbers again, as a simulation does, gives another source of bytes. Knows no settings and no files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
Entropy = Callable[[int], bytes]  # so many bytes that nobody can predict

PIECE = 1 << 16  # numbers drawn at once


def uniform(count: int, entropy: Entropy = os.urandom) -> F64:
    """Numbers in (0, 1], float64 (count,), from 64 bits each: as small as 2^-65, so that logarithms reach far."""
    words = np.frombuffer(entropy(8 * count), "<u8")
    return (words.astype(np.float64) + 0.5) * 2.0**-64


def gaussian(count: int, entropy: Entropy = os.urandom) -> F64:
    """Standard normal numbers, float64 (count,), by Box and Muller; none is over 9.5 in size."""
    pairs = -(-count // 2)
    u = uniform(2 * pairs, entropy)
    radius, angle = np.sqrt(-2 * np.log(u[:pairs])), 2 * np.pi * u[pairs:]
    return np.concatenate((radius * np.cos(angle), radius * np.sin(angle)))[:count]


def rounded_gaussian(scale: float, count: int, entropy: Entropy = os.urandom) -> F64:
    """Whole numbers (count,): normal ones of standard deviation `scale`, rounded to the nearest.

    Added to a whole number they make what rounding the Gaussian mechanism's answer makes, so that it costs no more
    privacy than that, and no bits are left below the grid for anybody to read (Mironov, CCS'12).
    """
    return np.rint(scale * gaussian(count, entropy))


def poisson_samples(
    steps: int, examples: int, rate: float, entropy: Entropy = os.urandom
) -> Iterator[NDArray[np.int64]]:
    """For each of `steps` steps the indices of the examples in it, ascending: each of `examples` with chance `rate`.

    All steps' coins are laid end to end, and only the gaps between heads are drawn, which are geometric.
    """
    if rate >= 1:
        for _ in range(steps):
            yield np.arange(examples, dtype=np.int64)
        return
    total, last, step = steps * examples, -1, 0
    pending: list[int] = []
    while last < total:
        gaps = np.floor(np.log(uniform(PIECE, entropy)) / np.log1p(-rate))
        places = last + np.cumsum(np.minimum(gaps, total) + 1)
        for place in places.astype(np.int64).tolist():
            last = place
            while step < min(place // examples, steps):
                yield np.array(pending, np.int64)
                pending, step = [], step + 1
            if step == steps:
                return
            pending.append(place % examples)
