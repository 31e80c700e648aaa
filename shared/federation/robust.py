"""Robust aggregators: norm clipping, coordinate-wise median, trimmed mean, Krum.

Updates are processed side by side in blocks of coordinates, so memory is a small multiple of MAX_BYTES and not
devices x D. All updates have equal weight, because a malicious device would claim a large weight.

source: Sun et al., 2019 (norm clipping); Yin et al., ICML 2018 (median, trimmed mean); Blanchard et al., NeurIPS 2017
(Krum, multi-Krum).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shared.federation.sources import UpdateSource
from shared.federation.update import F32, F64

MAX_BYTES = 64 << 20  # memory for a block of updates, and for Krum's distances


# Safety margin, so that rounding cannot lift an update's norm above the bound that privacy depends on.
_MARGIN = 1 - 2.0**-20


def clip_scale(norm: float, clip_norm: float | None) -> float:
    """Returns the factor that scales an update of this Euclidean norm to at most clip_norm; 1 if it is small enough."""
    return 1.0 if clip_norm is None or norm <= clip_norm else clip_norm / norm * _MARGIN


def median(block: F32) -> F32:
    """Returns the median of each column of (n, c), float32 (c,). For even n it is the mean of the middle two."""
    half = len(block) // 2
    rows = _rows(block)
    rows.partition(half, axis=1)
    upper = rows[:, half].astype(np.float64)
    lower = upper if len(block) % 2 else rows[:, :half].max(axis=1)
    return ((lower + upper) / 2).astype(np.float32)


def trimmed_count(count: int, share: float) -> int:
    """Returns how many of `count` values are left out at each end of a coordinate."""
    return int(count * share)


def trimmed_mean(block: F32, share: float) -> F32:
    """Returns the mean of each column of (n, c), float32 (c,), without floor(n share) values at each end."""
    trimmed = trimmed_count(len(block), share)
    kept_count = len(block) - 2 * trimmed
    rows = _rows(block)
    if trimmed:
        rows.partition(trimmed, axis=1)
        rows = rows[:, trimmed:]
        rows.partition(kept_count - 1, axis=1)
    sums: F64 = np.add.reduce(rows[:, :kept_count], axis=1, dtype=np.float64)
    return (sums / kept_count).astype(np.float32)


def _rows(block: F32) -> F32:
    """Returns the contiguous transpose (c, n) of (n, c).

    NumPy's partition of contiguous rows uses vector instructions and is two to four times as fast.
    """
    return np.array(block.T, np.float32, order="C")


def columnwise(source: UpdateSource, scales: Sequence[float], rule: Callable[[F32], F32]) -> F32:
    """Applies `rule` to each column of all updates, each times its scale. Returns float32 (D,)."""
    result = np.empty(source.size, np.float32)
    factors = np.array(scales, np.float32)[:, None]
    for start, block in source.blocks(columns(source)):
        if (factors != 1).any():
            block *= factors
        result[start : start + block.shape[1]] = rule(block)
    return result


def columns(source: UpdateSource) -> int:
    """Returns the number of coordinates processed together."""
    return max(1, min(source.size, MAX_BYTES // (8 * len(source.contributions))))


def krum_scores(source: UpdateSource, scales: Sequence[float], norms: Sequence[float], malicious: int) -> F64:
    """Returns the Krum scores, float64 (n,): the sum of squared distances to the n - f - 2 nearest updates.

    norms: of the updates before scaling. The Gram matrix is summed over blocks of coordinates, and as many of its rows
    at a time as MAX_BYTES allows. Raises ValueError if n < 2 f + 3, which Krum requires.
    """
    count = len(source.contributions)
    check_krum(count, malicious)
    factors = np.array(scales)[:, None]
    squares = np.square(np.array(scales) * np.array(norms))
    rows = max(1, min(count, MAX_BYTES // (32 * count)))  # four float64 arrays of that many rows live at once
    scores = np.empty(count)
    for start in range(0, count, rows):
        tile = slice(start, min(start + rows, count))
        gram = np.zeros((tile.stop - start, count))
        for _, block in source.blocks(columns(source)):
            wide = block * factors  # (n, c) float64
            gram += wide[tile] @ wide.T
        distances = np.maximum(squares[tile, None] + squares - 2 * gram, 0)
        distances[np.arange(len(distances)), np.arange(start, tile.stop)] = np.inf  # no update is its own neighbour
        neighbours = count - malicious - 2
        scores[tile] = np.partition(distances, neighbours - 1, axis=1)[:, :neighbours].sum(axis=1)
    return scores


def check_krum(count: int, malicious: int) -> None:
    """Raises ValueError unless Krum tolerates `malicious` of `count` updates."""
    if count < 2 * malicious + 3:
        raise ValueError(
            f"krum tolerates {malicious} malicious updates among at least {2 * malicious + 3}, not {count}"
        )


def krum_choice(scores: F64, malicious: int, *, several: bool) -> list[int]:
    """Returns the ascending indices of the chosen updates: the best one, or multi-Krum's best n - f - 2.

    Ties go to the earlier update.
    """
    order = np.argsort(scores, kind="stable")
    return sorted(int(index) for index in order[: len(scores) - malicious - 2 if several else 1])
