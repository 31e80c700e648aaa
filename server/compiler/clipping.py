"""A private step's sums in the graph: each example's loss differences clipped, cut to whole units, summed, noised.

The arithmetic is `shared.privacy.contributions`; what an example adds is a function of its own row alone, and bounded
whatever that row is. Knows no model and no update.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shared.privacy import MOST, UNITS


def example_means(per_path: Tensor, mask: Tensor) -> Tensor:
    """Each example's own loss on each path, (2q, E). per_path: (2q, E*T). mask: (E, T); without a token it is 0."""
    examples, tokens = mask.shape
    weighed = per_path.reshape(-1, examples, tokens) * mask.unsqueeze(0)
    return weighed.sum(dim=2) / torch.clamp(mask.sum(dim=1), min=1.0).unsqueeze(0)


def noised_totals(losses: Tensor, clip: Tensor, carried: Tensor) -> Tensor:
    """Whole units of clip / UNITS, (q,): the examples' contributions and `carried` (q,), which is noise or sums so far.

    losses: (2q, E) at B + eps z_i, then at B - eps z_i. clip: [1]. Each contribution's L2 norm is at most UNITS.
    """
    queries = losses.shape[0] // 2
    scaled = (losses[:queries] - losses[queries:]) / clip  # (q, E)
    scaled = torch.where(scaled == scaled, scaled, torch.zeros_like(scaled))  # no number, as inf - inf, counts as zero
    scaled = torch.clamp(scaled, min=-MOST, max=MOST)
    norms = torch.sqrt((scaled * scaled).sum(dim=0, keepdim=True))  # (1, E)
    # One unit less than the bound pays for the rounding of norms and products in float32.
    units = torch.trunc(scaled * ((UNITS - 1) / torch.clamp(norms, min=1.0)))
    return units.sum(dim=1) + carried
