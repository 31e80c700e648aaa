"""One device's update of flat B, and its metadata."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BLOCK = 1 << 15  # elements of B per block: 256 KiB in float64, which fits into the L2 cache
_ROW = 1 << 13  # elements of one dot product: few enough that BLAS starts no threads


@dataclass(frozen=True)
class Contribution:
    """The metadata of an update: its member, its number of examples, and how many versions it is behind."""

    member: str
    examples: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.examples < 0 or self.staleness < 0:
            raise ValueError(f"{self.member}: {self.examples} examples, staleness {self.staleness}")


@dataclass(frozen=True)
class Update:
    """B after a device's training minus B before it, float32 (D,).

    A source may reuse `flat` for the next update; copy it to keep it.
    """

    member: str
    flat: F32
    examples: int = 1
    staleness: int = 0
    known_norm: float | None = None  # norm of flat, if already computed

    def __post_init__(self) -> None:
        if self.flat.dtype != np.float32 or self.flat.ndim != 1:
            raise ValueError(f"{self.member}: an update is one float32 vector, not {self.flat.dtype} {self.flat.shape}")
        Contribution(self.member, self.examples, self.staleness)  # validates the metadata

    @property
    def contribution(self) -> Contribution:
        """The metadata of the update."""
        return Contribution(self.member, self.examples, self.staleness)

    @property
    def norm(self) -> float:
        """Euclidean norm of flat."""
        return euclidean_norm(self.flat) if self.known_norm is None else self.known_norm


def difference(after: F32, before: F32) -> F32:
    """Returns B after minus B before, float32 (D,), rounded once per element. Raises ValueError if sizes differ."""
    if after.shape != before.shape:
        raise ValueError(f"B has {after.size} elements after the run and {before.size} before it")
    return np.subtract(after, before, dtype=np.float32)


def euclidean_norm(flat: F32) -> float:
    """Returns the Euclidean norm of float32 (D,). Squares are summed in float64 and neither overflow nor underflow."""
    squares = 0.0
    buffer = np.empty(min(BLOCK, flat.size), np.float64)
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        wide = buffer[: block.size]
        np.copyto(wide, block)
        squares += sum_of_squares(wide)
    return float(np.sqrt(squares))


def sum_of_squares(wide: F64) -> float:
    """Returns the sum of squares of a block's elements, float64 (n,)."""
    row_elements = wide.size // _ROW * _ROW
    rows, remainder = wide[:row_elements].reshape(-1, _ROW), wide[row_elements:]
    return float(np.vecdot(rows, rows).sum() + np.dot(remainder, remainder))
