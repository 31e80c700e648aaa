"""Private steps in the graph: what each example contributes is clipped, and secret noise is added to the sum.

Exact gradients take the arithmetic of `shared.privacy.gradient_contributions` and `gradient_noise` (DP-SGD); loss
differences and projected gradients take that of `shared.privacy.contributions`. Sums are of whole numbers and exact in
any order. An example's contribution depends on its own row only and is bounded for any row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from server.compiler.methods.noise import gaussian
from server.compiler.methods.step_inputs import StepInputs
from shared.privacy import MARGIN, MAX_DIFFERENCE, MAX_GRADIENT, NOISE_UNITS, UNITS


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


BRANCHES = 256  # terms of one float32 sum; its relative error is at most BRANCHES / 2^24


def clipped_sum(gradients: Sequence[Tensor], inputs: StepInputs) -> Tensor:
    """The sum of the clipped gradients of some examples in whole units of sigma clip / NOISE_UNITS, int32 (D,).

    gradients: in B, one (rows, slab) for each adapted layer.
    """
    squares = [sum_of_squares(bounded(part, inputs.clip)) for part in gradients]
    total = squares[0]
    for more in squares[1:]:
        total = total + more
    most = (1.0 - MARGIN) * NOISE_UNITS / inputs.sigma  # [1]
    factors = most / torch.clamp(torch.sqrt(total), min=1.0)  # (rows, 1)
    sums = [
        torch.trunc(bounded(part, inputs.clip) * factors).to(torch.int32).sum(dim=0, dtype=torch.int32)
        for part in gradients
    ]
    return torch.cat(sums) if len(sums) > 1 else sums[0]


def bounded(gradients: Tensor, clip: Tensor) -> Tensor:
    """The gradients divided by clip; NaN counts as zero, and no square overflows."""
    scaled = gradients / clip
    scaled = torch.where(scaled == scaled, scaled, torch.zeros_like(scaled))
    return torch.clamp(scaled, min=-MAX_GRADIENT, max=MAX_GRADIENT)


def sum_of_squares(values: Tensor) -> Tensor:
    """The sums of squares of each row, (rows, 1), added as a tree, whose rounding has a bound. values: (rows, n)."""
    sums, rows = values * values, values.shape[0]
    while (count := sums.shape[1]) > 1:
        if count > BRANCHES:
            if padding := -count % BRANCHES:
                sums = torch.cat((sums, torch.zeros(rows, padding)), dim=1)
            sums = sums.reshape(rows, -1, BRANCHES).sum(dim=2)
        else:
            sums = sums.sum(dim=1, keepdim=True)
    return sums


def noise_units(inputs: StepInputs, size: int) -> Tensor:
    """The noise of a step's last call in whole units, int32 (D,); zeros in the calls before. size: D."""
    total = gaussian(inputs.keys[:1], size).reshape(-1)
    for index in range(1, inputs.keys.shape[0]):
        total = total + gaussian(inputs.keys[index : index + 1], size).reshape(-1)
    scale = NOISE_UNITS / inputs.keys.shape[0] ** 0.5
    return torch.round(total * scale * inputs.last).to(torch.int32)


def mean_gradient(totals: Tensor, inputs: StepInputs, batch: int) -> Tensor:
    """The noised mean gradient (D,) of totals, int32 (D,). batch: E, the divisor whatever the sample's size."""
    return totals.to(torch.float32) * (inputs.sigma * inputs.clip / (NOISE_UNITS * batch))
