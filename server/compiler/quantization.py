"""Frozen linear weights in fewer bits: how they are rounded, multiplied, and named in files.

int8 and int4 quantize activations too, per token and on the fly (8da8w; 8da4w in groups of 32); the weight-only forms
keep activations in float32 (paper, Section "MobiZO with weight-only quantization"). XNNPACK has a kernel for each. In
int8, down_proj's activations stay float32: what a gate lets through has outliers that one scale a token cannot hold
(ADR 7). XNNPACK has no such kernel for groups of 4 bits.
Knows no decoder, no recipe and no file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers torch.ops.quantized_decomposed
from torch.nn import functional

from shared.errors import InvalidRecipe
from shared.lora import BaseShape
from shared.recipe import Precision, Target

GROUP = 32  # input features that share a scale in 8da4w; XNNPACK takes multiples of 32
SCALE = "_scale"  # ending of a scale's name
_SCALE_KEY = "scale_"  # XNNPACK's prefix of scales' keys

_quantized = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Scheme:
    """One way to hold a weight. bits: of a stored value; group: input features a scale, None for all of a row's."""

    bits: int
    group: int | None
    dynamic: bool  # activations are quantized too

    @property
    def multiple(self) -> int:
        """Input features come in multiples of it: whole groups, whole bytes."""
        return self.group or (2 if self.bits == 4 else 1)

    @property
    def largest(self) -> int:
        """Of the symmetric range of stored values."""
        return (1 << (self.bits - 1)) - 1

    @property
    def smallest(self) -> int:
        """Of the range that kernels assume."""
        return -8 if self.bits == 4 else -127


SCHEMES: dict[Precision, Scheme] = {
    "int8": Scheme(8, None, True),
    "int4": Scheme(4, GROUP, True),
    "int8-weight": Scheme(8, None, False),
    "int4-weight": Scheme(4, None, False),
}
FLOAT_INPUTS: dict[Precision, frozenset[Target]] = {"int8": frozenset({"down_proj"})}
ROWS = Scheme(8, None, False)  # embedding tables and lm_head in every quantized precision


def target_scheme(precision: Precision, target: Target) -> Scheme | None:
    """How one linear layer is held and multiplied; None: float32. Values and scales are the precision's either way."""
    scheme = SCHEMES.get(precision)
    if scheme is not None and target in FLOAT_INPUTS.get(precision, ()):
        return replace(scheme, dynamic=False)
    return scheme


def check_precision(precision: Precision, shape: BaseShape) -> None:
    """Raises InvalidRecipe, naming the layer and the remedy, when a linear layer cannot be held in `precision`."""
    scheme = SCHEMES.get(precision)
    if scheme is None:
        return
    for target in shape.linears:
        features, _ = shape.features(target)
        if features % scheme.multiple:
            raise InvalidRecipe(
                f"precision {precision} takes multiples of {scheme.multiple} input features; {target} has {features}: "
                f"use {'int8' if scheme.dynamic else 'int8-weight'}"
            )


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """(values int8 (out, in), scales float32 (out,) or (out, in / group)); weight: float32 (out, in).

    Symmetric, to nearest. Group scales are rounded to bfloat16 first, as XNNPACK holds them.
    """
    rows, columns = weight.shape
    blocks = weight.reshape(rows, -1, scheme.group or columns)
    scales = blocks.abs().amax(dim=2).clamp(min=torch.finfo(torch.float32).tiny) / scheme.largest
    if scheme.group:
        scales = scales.to(torch.bfloat16).to(torch.float32)
    values = (blocks / scales.unsqueeze(2)).round().clamp(scheme.smallest, scheme.largest)
    return values.reshape(rows, columns).to(torch.int8), scales if scheme.group else scales.squeeze(1)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """The float32 weight (out, in) that the values stand for."""
    rows = len(values)
    return (values.reshape(rows, scales[0].numel(), -1) * scales.reshape(rows, -1, 1)).reshape(values.shape)


def linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, scheme: Scheme) -> Tensor:
    """x (..., in) times the weight's transpose, plus bias, in the operations that XNNPACK recognizes."""
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    bounds = (scheme.smallest, scheme.largest, torch.int8)
    if scheme.group:
        weight = _quantized.dequantize_per_channel_group(values, scales, zeros, *bounds, scheme.group, torch.float32)
    else:
        weight = _quantized.dequantize_per_channel(values, scales, zeros, 0, *bounds)
    if scheme.dynamic:
        token_scale, token_zero = _quantized.choose_qparams_per_token_asymmetric(x, torch.int8)
        token = (token_scale, token_zero, -128, 127, torch.int8)
        x = _quantized.dequantize_per_token(_quantized.quantize_per_token(x, *token), *token, torch.float32)
    return functional.linear(x, weight, bias)


def stored_key(name: str, tensor: Tensor, scheme: Scheme | None) -> str:
    """The key that XNNPACK gives a constant's data: its sha256. name: the buffer's, which tells scales from values."""
    prefix = _SCALE_KEY if name.endswith(SCALE) else ""
    return prefix + hashlib.sha256(stored_bytes(name, tensor, scheme)).hexdigest()


def stored_bytes(name: str, tensor: Tensor, scheme: Scheme | None) -> bytes:
    """A constant as XNNPACK stores it: group scales in bfloat16, 4-bit values plus 8, two a byte, the first one low."""
    if scheme is not None and name.endswith(SCALE) and scheme.group:
        tensor = tensor.to(torch.bfloat16).view(torch.int16)
    elif scheme is not None and tensor.dtype == torch.int8 and scheme.bits == 4:
        nibbles = (tensor + 8).to(torch.uint8).reshape(-1)
        tensor = nibbles[1::2] << 4 | nibbles[::2]
    return bytes(tensor.contiguous().numpy().data)
