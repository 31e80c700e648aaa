"""The reverses of a layer's steps without weights to multiply by: norms, activations and rotations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from server.compiler.model.decoder import LayerNorm, RmsNorm, upper_tail

LEAST = torch.finfo(torch.float32).tiny  # what a rectifier lets through, over itself, is its slope
GELU = 2 * math.sqrt(2 / math.pi)


@dataclass(frozen=True)
class Normed:
    """A norm's intermediate results."""

    unit: Tensor  # (..., size), of unit root mean square
    inverse: Tensor  # (..., 1), what it was multiplied by


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The transpose of `rotate`: x (E, S, heads, head_dim) turned back by its positions' angles."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def rms_of(norm: RmsNorm | LayerNorm) -> RmsNorm:
    """The root-mean-square norm within a norm."""
    return norm.rms if isinstance(norm, LayerNorm) else norm


def normed(norm: RmsNorm | LayerNorm, x: Tensor) -> Normed:
    """x (..., size) normed, before weight and bias."""
    rms = rms_of(norm)
    if isinstance(norm, LayerNorm):
        x = x - functional.linear(x, rms.mean)
    inverse = torch.rsqrt(functional.linear(x * x, rms.mean, rms.eps))
    return Normed(x * inverse, inverse)


def norm_output(norm_results: Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The norm's output (..., size)."""
    return norm_results.unit * weight if bias is None else norm_results.unit * weight + bias


def norm_reverse(norm: RmsNorm | LayerNorm, gradient: Tensor, weight: Tensor, norm_results: Normed) -> Tensor:
    """gradient (..., size) of a norm's output -> of its input. With u = x / rms(x): dx = (g - u mean(g u)) / rms(x)."""
    rms = rms_of(norm)
    scaled = gradient * weight
    along_unit = functional.linear(scaled * norm_results.unit, rms.mean)
    of_centred = (scaled - norm_results.unit * along_unit) * norm_results.inverse
    return of_centred - functional.linear(of_centred, rms.mean) if isinstance(norm, LayerNorm) else of_centred


def activation(kind: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The activation of x and its slope, both of x's shape. kind: as `BaseFacts.activation`."""
    if kind == "relu":
        output = torch.relu(x)
        return output, output / torch.clamp(x, min=LEAST)  # no constant tensor: the weight cache would free it
    if kind == "relu2":
        rectified = torch.relu(x)
        return rectified * rectified, rectified * 2.0
    if kind == "gelu":
        rectified, magnitude = torch.relu(x), torch.abs(x)
        tail, positive = upper_tail(magnitude), rectified / torch.clamp(x, min=LEAST)
        below = positive + tail - positive * tail * 2.0  # the normal distribution's share below x
        return rectified - magnitude * tail, below + x * torch.exp(x * x * -0.5) * (1.0 / math.sqrt(2 * math.pi))
    if kind == "silu":
        gate = torch.sigmoid(x)
        output = x * gate
        return output, gate + output - output * gate
    # 0.5 x (1 + tanh y) is x sigmoid(2 y)
    gate = torch.sigmoid((x * x * x * 0.044715 + x) * GELU)
    output = x * gate
    return output, gate + (output - output * gate) * ((x * x * (3 * 0.044715) + 1.0) * GELU)
