"""Updates as integers that add up exactly: fixed point modulo 2^32 or 2^64, the weight as one more element.

Sums of integers are the same in any order and under any mask, which sums of floats are not. Knows no masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import InvalidUpload
from shared.masking.settings import MaskingParameters

F32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
F64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
Words = np.ndarray[tuple[int, ...], np.dtype[Any]]  # little-endian uint32 or uint64

# Taken off a factor below one, so that rounding its products to float32 cannot lift their norm over the bound.
_MARGIN = 1 - 2.0**-22


@dataclass(frozen=True)
class Total:
    """A decoded sum. mean: weighted by w, float64 (D,). weight: the sum of all w. count: devices in it."""

    mean: F64
    weight: int
    count: int


def word(parameters: MaskingParameters) -> np.dtype[Any]:
    """The type of one element on the wire."""
    return np.dtype(f"<u{parameters.bits // 8}")


def vector_bytes(parameters: MaskingParameters) -> int:
    """Bytes of one device's masked vector: D elements and the weight."""
    return (parameters.size + 1) * word(parameters).itemsize


def clipped(update: F32, bound: float) -> F32:
    """An update (D,) scaled down to an L2 norm of at most `bound`, in float32; every element is then at most that, too.

    Raises InvalidUpload for an update that is not finite.
    """
    norm = float(np.sqrt(np.sum(np.square(update, dtype=np.float64))))
    if not np.isfinite(norm):
        raise InvalidUpload("the update has values that are not finite; training diverged: lower lr")
    scaled = update
    if norm > bound:
        # In float64, as the factor alone may be too small for float32.
        scaled = (update.astype(np.float64) * (bound / norm * _MARGIN)).astype(np.float32)
    largest = np.float32(bound)
    if largest > bound:
        largest = np.nextafter(largest, np.float32(0))
    return np.clip(scaled, -largest, largest)


def encode(update: F32, weight: int, parameters: MaskingParameters) -> Words:
    """(D + 1,) integers modulo 2^bits: round(s w clip(update)), then w; negative ones as their two's complement.

    Both products are exact in float64: an element has 24 bits, w at most 24, and s is a power of two. What is lost is
    at most 1/2 an element by rounding. Raises InvalidUpload for another size, a weight outside 1 to W, or an element
    that is not finite.
    """
    if update.shape != (parameters.size,):
        raise InvalidUpload(f"the update has shape {update.shape}; this round's is ({parameters.size},)")
    if not 1 <= weight <= parameters.most_weight:
        raise InvalidUpload(f"an update counts for 1 to {parameters.most_weight} here, not for {weight}")
    exact = clipped(update, parameters.clip).astype(np.float64) * weight * parameters.scale
    words = np.empty(parameters.size + 1, f"<i{parameters.bits // 8}")
    words[:-1] = np.rint(exact)
    words[-1] = weight
    return words.view(word(parameters))


def decode(total: Words, count: int, parameters: MaskingParameters) -> Total:
    """The weighted mean from the sum (D + 1,) of `count` encodings, whose integers it is exactly.

    |mean - true mean| <= count / (2 s weight) in each element, beside float64's own rounding. Raises InvalidUpload if
    the sum of the weights is one that honest devices cannot have.
    """
    signed = total.view(f"<i{parameters.bits // 8}")
    weight = int(signed[-1])
    if not count <= weight <= count * parameters.most_weight:
        raise InvalidUpload(
            f"the weights of {count} devices add up to {weight}, which honest ones' cannot: one of them sent a vector "
            "of another form"
        )
    return Total(signed[:-1].astype(np.float64) / (parameters.scale * weight), weight, count)


def mean_error(count: int, weight: int, parameters: MaskingParameters) -> float:
    """The most by which an element of the decoded mean differs from that of the clipped updates."""
    return count / (2 * parameters.scale * weight)
