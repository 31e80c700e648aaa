"""Encodes updates as integers whose sum is exact: fixed point modulo 2^32 or 2^64, with the weight as an extra element.

Unlike sums of floats, sums of integers do not depend on the order or on masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import InvalidUpload
from shared.federation.secure_aggregation.settings import SecureAggregationParameters

F32 = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
F64 = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
IntegerVector = np.ndarray[tuple[int, ...], np.dtype[Any]]  # little-endian uint32 or uint64

# Safety margin, so that rounding the products to float32 cannot lift their norm above the bound.
_MARGIN = 1 - 2.0**-22


@dataclass(frozen=True)
class Total:
    """A decoded sum. mean: weighted by w, float64 (D,). weight: the sum of all w. count: number of devices."""

    mean: F64
    weight: int
    count: int


def element_dtype(parameters: SecureAggregationParameters) -> np.dtype[Any]:
    """Returns the data type of one element on the wire."""
    return np.dtype(f"<u{parameters.bits // 8}")


def vector_bytes(parameters: SecureAggregationParameters) -> int:
    """Returns the bytes of one device's masked vector: D elements and the weight."""
    return (parameters.size + 1) * element_dtype(parameters).itemsize


def clip_to_norm(update: F32, bound: float) -> F32:
    """Returns an update (D,) scaled down to an L2 norm of at most `bound`, float32. No element exceeds `bound`.

    Raises InvalidUpload for an update that is not finite.
    """
    norm = float(np.sqrt(np.sum(np.square(update, dtype=np.float64))))
    if not np.isfinite(norm):
        raise InvalidUpload("the update has non-finite values: training diverged; lower lr")
    scaled = update
    if norm > bound:
        # In float64, because the factor may underflow in float32.
        scaled = (update.astype(np.float64) * (bound / norm * _MARGIN)).astype(np.float32)
    largest = np.float32(bound)
    if largest > bound:
        largest = np.nextafter(largest, np.float32(0))
    return np.clip(scaled, -largest, largest)


def encode(update: F32, weight: int, parameters: SecureAggregationParameters) -> IntegerVector:
    """Returns (D + 1,) integers modulo 2^bits: round(s w clip(update)), then w.

    Negative values are in two's complement.

    Both products are exact in float64: an element has 24 bits, w at most 24, and s is a power of two. Rounding changes
    an element by at most 1/2. Raises InvalidUpload for another size, a weight outside 1 to W, or a non-finite element.
    """
    if update.shape != (parameters.size,):
        raise InvalidUpload(f"the update has shape {update.shape}; the round requires ({parameters.size},)")
    if not 1 <= weight <= parameters.most_weight:
        raise InvalidUpload(f"the weight of an update must be 1 to {parameters.most_weight}, not {weight}")
    exact = clip_to_norm(update, parameters.clip).astype(np.float64) * weight * parameters.scale
    integers = np.empty(parameters.size + 1, f"<i{parameters.bits // 8}")
    integers[:-1] = np.rint(exact)
    integers[-1] = weight
    return integers.view(element_dtype(parameters))


def decode(total: IntegerVector, count: int, parameters: SecureAggregationParameters) -> Total:
    """Returns the weighted mean from the sum (D + 1,) of `count` encodings.

    |mean - true mean| <= count / (2 s weight) in each element, plus float64 rounding. Raises InvalidUpload if the sum
    of the weights is impossible for honest devices.
    """
    signed = total.view(f"<i{parameters.bits // 8}")
    weight = int(signed[-1])
    if not count <= weight <= count * parameters.most_weight:
        raise InvalidUpload(
            f"the weights of {count} devices add up to {weight}, which valid weights cannot; a device sent an invalid "
            "vector"
        )
    return Total(signed[:-1].astype(np.float64) / (parameters.scale * weight), weight, count)


def mean_error(count: int, weight: int, parameters: SecureAggregationParameters) -> float:
    """Returns the largest difference of an element of the decoded mean from that of the clipped updates."""
    return count / (2 * parameters.scale * weight)
