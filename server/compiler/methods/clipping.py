"""Clipping of a private step in the graph: loss differences are clipped per example, truncated, summed and noised.

The arithmetic is that of `shared.privacy.contributions`. An example's contribution depends on its own row only and is
bounded for any row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.privacy import MAX_DIFFERENCE, UNITS


def example_means(per_path: Tensor, mask: Tensor) -> Tensor:
    """Returns the example mean of the loss (`shared.zo.encoding`) on each path, (n, E); 0 for a row without tokens.

    per_path: (n, E*T). mask: (E, T).
    """
    examples, tokens = mask.shape
    weighed = per_path.reshape(-1, examples, tokens) * mask.unsqueeze(0)
    return weighed.sum(dim=2) / torch.clamp(mask.sum(dim=1), min=1.0).unsqueeze(0)


def noised_sums(scalars: Tensor, clip: Tensor, carried: Tensor) -> Tensor:
    """Returns the sum of the examples' contributions and `carried` (q,), in units of clip / UNITS, (q,).

    scalars: (q, E), each example's loss differences or projected gradients. carried: noise, or the sums so far. clip:
    [1]. The L2 norm of each contribution is at most UNITS.
    """
    scaled = scalars / clip
    scaled = torch.where(scaled == scaled, scaled, torch.zeros_like(scaled))  # NaN (inf - inf) counts as zero
    scaled = torch.clamp(scaled, min=-MAX_DIFFERENCE, max=MAX_DIFFERENCE)
    norms = torch.sqrt((scaled * scaled).sum(dim=0, keepdim=True))  # (1, E)
    # One unit below the bound, to allow for float32 rounding of norms and products.
    units = torch.trunc(scaled * ((UNITS - 1) / torch.clamp(norms, min=1.0)))
    return units.sum(dim=1) + carried


def single_rows(values: Tensor) -> list[Tensor]:
    """Each row by itself, (1, ...): a product over several rows may round a row by its place among them.

    Slices, because back ends do not take `split`.
    """
    rows = values.shape[0]
    return [values] if rows == 1 else [values[row : row + 1] for row in range(rows)]
