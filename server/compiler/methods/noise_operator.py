"""The paper's noise operator for the exporter: `mobizo::noise`, one call that replaces the arithmetic of `gaussian`.

The kernel is in the native runner (device_agent/runner/noise.cpp) and returns the same noise as `gaussian`. The Python
runtime of ExecuTorch does not have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from server.compiler.methods.noise import gaussian

FUNCTION = "mobizo::noise"
OUT = "mobizo::noise.out"  # the variant that programs call, inserted by ExecuTorch's passes


def noise_call(seeds: Tensor, size: int) -> Tensor:
    """Returns the direction z ~ N(0, I) of every query by the operator, float32 (q, size). seeds: int32 (q, 2)."""
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
