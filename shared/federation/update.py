"""One device's update of flat B, and what is known of it without reading it.

Knows neither files nor how updates are averaged.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BLOCK = 1 << 15  # elements of B taken at once: 256 KiB in float64, which stay in a core's second cache
_ROW = 1 << 13  # elements of one dot product: fewer than BLAS would start threads for


@dataclass(frozen=True)
class Contribution:
    """What an update is but for its numbers: whose, of how many examples, how many versions behind."""

    member: str
    examples: int = 1
    staleness: int = 0

    def __post_init__(self) -> None:
        if self.examples < 0 or self.staleness < 0:
            raise ValueError(f"{self.member}: {self.examples} examples, staleness {self.staleness}")


@dataclass(frozen=True)
class Update:
    """B after a device's work minus B before it, float32 (D,).

    A source may use `flat` again for the next update: who keeps one, copies it.
    """

    member: str
    flat: F32
    examples: int = 1
    staleness: int = 0
    known_norm: float | None = None  # of flat, where whoever made this has measured it

    def __post_init__(self) -> None:
        if self.flat.dtype != np.float32 or self.flat.ndim != 1:
            raise ValueError(f"{self.member}: an update is one float32 vector, not {self.flat.dtype} {self.flat.shape}")
        Contribution(self.member, self.examples, self.staleness)  # which refuses claims that cannot be

    @property
    def contribution(self) -> Contribution:
        """All but the numbers."""
        return Contribution(self.member, self.examples, self.staleness)

    @property
    def norm(self) -> float:
        """Euclidean norm of flat."""
        return euclidean_norm(self.flat) if self.known_norm is None else self.known_norm


def difference(after: F32, before: F32) -> F32:
    """B after minus B before, float32 (D,): one rounding for each element."""
    if after.shape != before.shape:
        raise ValueError(f"B of {after.size} elements cannot go on from one of {before.size}")
    return np.subtract(after, before, dtype=np.float32)


def euclidean_norm(flat: F32) -> float:
    """Euclidean norm of float32 (D,), its squares summed in float64: no finite B overflows, none underflows."""
    squares = 0.0
    buffer = np.empty(min(BLOCK, flat.size), np.float64)
    for at in range(0, flat.size, BLOCK):
        block = flat[at : at + BLOCK]
        wide = buffer[: block.size]
        np.copyto(wide, block)
        squares += sum_of_squares(wide)
    return float(np.sqrt(squares))


def sum_of_squares(wide: F64) -> float:
    """Of a block's elements, float64 (n,)."""
    whole = wide.size // _ROW * _ROW
    rows, rest = wide[:whole].reshape(-1, _ROW), wide[whole:]
    return float(np.vecdot(rows, rows).sum() + np.dot(rest, rest))
