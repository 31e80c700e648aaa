"""The paper's noise operator as the exporter sees it: `mobizo::noise`, one call in place of `gaussian`'s arithmetic.

The kernel is the native runner's (device_agent/runner/noise.cpp) and draws what `gaussian` draws; ExecuTorch's Python
runtime has none. Knows no recipe.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.compiler.noise import gaussian

FUNCTION = "mobizo::noise"
OUT = "mobizo::noise.out"  # what a program calls: ExecuTorch's passes put it in the function's place


def noise_call(seeds: Tensor, size: int) -> Tensor:
    """Every query's direction z ~ N(0, I) by the operator. seeds: int32 (q, 2). Returns float32 (q, size)."""
    z: Tensor = torch.ops.mobizo.noise(seeds, size)
    return z


def _drawn(seeds: Tensor, size: int) -> Tensor:
    return gaussian(seeds, size).contiguous()


def _shaped(seeds: Tensor, size: int) -> Tensor:
    return seeds.new_empty((seeds.shape[0], size), dtype=torch.float32)


torch.library.define(FUNCTION, "(Tensor seeds, SymInt size) -> Tensor")
torch.library.define(OUT, "(Tensor seeds, SymInt size, *, Tensor(a!) out) -> Tensor(a!)")
torch.library.impl(FUNCTION, "CPU", _drawn)
torch.library.register_fake(FUNCTION, _shaped)
