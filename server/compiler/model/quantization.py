"""Quantization of frozen linear weights: rounding, multiplication, and names in files.

int8 and int4 also quantize activations dynamically per token (8da8w; 8da4w in groups of 32). The weight-only precisions
keep activations in float32 (paper, Section "MobiZO with weight-only quantization"). XNNPACK has a kernel for each. In
int8, the activations of down_proj stay float32, because they have outliers that one scale per token cannot represent
(ADR 7). XNNPACK has no such kernel for groups of 4 bits.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers torch.ops.quantized_decomposed
from torch.nn import functional

from shared.errors import InvalidRecipe
from shared.recipe import Precision, Target
from shared.zo.lora import BaseShape

GROUP = 32  # input features that share a scale in 8da4w; XNNPACK requires multiples of 32
BLOCK = 1 << 22  # elements of a weight that are rounded at once
SCALE = "_scale"  # suffix of the names of scales
_SCALE_KEY = "scale_"  # XNNPACK's prefix of the keys of scales

_quantized = torch.ops.quantized_decomposed


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme. bits: per stored value. group: input features per scale; None: one scale per row."""

    bits: int
    group: int | None
    dynamic: bool  # activations are also quantized

    @property
    def multiple(self) -> int:
        """The number of input features must be a multiple of this: whole groups and whole bytes."""
        return self.group or (2 if self.bits == 4 else 1)

    @property
    def largest(self) -> int:
        """Largest stored value of the symmetric range."""
        return (1 << (self.bits - 1)) - 1

    @property
    def smallest(self) -> int:
        """Smallest value of the range that kernels assume."""
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
    """Returns the scheme of one linear layer, or None for float32."""
    scheme = SCHEMES.get(precision)
    if scheme is not None and target in FLOAT_INPUTS.get(precision, ()):
        return replace(scheme, dynamic=False)
    return scheme


def check_precision(precision: Precision, shape: BaseShape) -> None:
    """Raises InvalidRecipe, with the layer and a remedy, if a linear layer cannot be stored in `precision`."""
    scheme = SCHEMES.get(precision)
    if scheme is None:
        return
    for target in shape.linears:
        features, _ = shape.features(target)
        if features % scheme.multiple:
            raise InvalidRecipe(
                f"precision {precision} requires a multiple of {scheme.multiple} input features; {target} has "
                f"{features}; use {'int8' if scheme.dynamic else 'int8-weight'}"
            )


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns values int8 (out, in) and scales float32 (out,) or (out, in / group) of a weight, float32 (out, in).

    Rounding is symmetric, to nearest. Group scales are first rounded to bfloat16, as XNNPACK stores them.
    """
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows, columns // (scheme.group or columns))
    step = max(1, BLOCK // columns)
    for at in range(0, rows, step):  # intermediate results of some rows at a time
        part = slice(at, at + step)
        blocks = weight[part].reshape(-1, scales.shape[1], scheme.group or columns)
        scale = blocks.abs().amax(dim=2).clamp(min=torch.finfo(torch.float32).tiny) / scheme.largest
        scales[part] = scale.to(torch.bfloat16).to(torch.float32) if scheme.group else scale
        rounded = (blocks / scales[part].unsqueeze(2)).round_().clamp_(scheme.smallest, scheme.largest)
        values[part] = rounded.reshape(-1, columns).to(torch.int8)
    return values, scales if scheme.group else scales.squeeze(1)


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    """Returns the float32 weight (out, in) that the values represent."""
    rows = len(values)
    return (values.reshape(rows, scales[0].numel(), -1) * scales.reshape(rows, -1, 1)).reshape(values.shape)


def linear(x: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns x (..., in) times the transposed weight, plus bias, with the operations that XNNPACK recognizes."""
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    bounds = (scheme.smallest, scheme.largest, torch.int8)
    if scheme.group:
        weight = _quantized.dequantize_per_channel_group(values, scales, zeros, *bounds, scheme.group, torch.float32)
    else:
        weight = _quantized.dequantize_per_channel(values, scales, zeros, 0, *bounds)
    return functional.linear(quantized_tokens(x) if scheme.dynamic else x, weight, bias)


def quantized_tokens(x: Tensor) -> Tensor:
    """Rounds x (..., features) to int8 with one scale and zero point per token, and returns it as float32."""
    token_scale, token_zero = _quantized.choose_qparams_per_token_asymmetric(x, torch.int8)
    token = (token_scale, token_zero, -128, 127, torch.int8)
    return _quantized.dequantize_per_token(_quantized.quantize_per_token(x, *token), *token, torch.float32)


def transposed_weight(values: Tensor) -> Tensor:
    """int8 values (out, in) as a float32 operand of `addmm`, one scale of 1 per input feature."""
    features = values.shape[1]
    ones, zeros = torch.ones(features), torch.zeros(features, dtype=torch.int64)
    return _quantized.dequantize_per_channel(values, ones, zeros, 1, -127, 127, torch.int8)


def stored_key(name: str, tensor: Tensor, scheme: Scheme | None) -> str:
    """Returns the key that XNNPACK gives a constant: its sha256. name: buffer name, which distinguishes scales."""
    return key_of(name, stored_bytes(name, tensor, scheme))


def key_of(name: str, data: bytes) -> str:
    """Returns the key of a constant with these stored bytes. name: see `stored_key`."""
    return (_SCALE_KEY if name.endswith(SCALE) else "") + hashlib.sha256(data).hexdigest()


def stored_bytes(name: str, tensor: Tensor, scheme: Scheme | None) -> bytes:
    """Returns a constant as XNNPACK stores it: group scales in bfloat16, 4-bit values plus 8, low nibble first."""
    if scheme is not None and name.endswith(SCALE) and scheme.group:
        tensor = tensor.to(torch.bfloat16).view(torch.int16)
    elif scheme is not None and tensor.dtype == torch.int8 and scheme.bits == 4:
        nibbles = (tensor + 8).to(torch.uint8).reshape(-1)
        tensor = nibbles[1::2] << 4 | nibbles[::2]
    return bytes(tensor.contiguous().numpy().data)
