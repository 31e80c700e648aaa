"""Products with quantized weights in a layer's graph, and the weights' bytes and names in files.

int8 and int4 also quantize activations dynamically per token (8da8w; 8da4w in groups of 32). The weight-only precisions
keep activations in float32 (paper, Section "MobiZO with weight-only quantization"). XNNPACK has a kernel for each. In
int8, the activations of down_proj stay float32, because they have outliers that one scale per token cannot represent.
XNNPACK has no such kernel for groups of 4 bits (ADR 28).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers torch.ops.quantized_decomposed
from torch.nn import functional

from server.compiler.model.rounding import OFFSET, ROWS, SCALE, Scheme

_SCALE_KEY = "scale_"  # XNNPACK's prefix of the keys of scales

_quantized = torch.ops.quantized_decomposed


def linear(x: Tensor, weight: Sequence[Tensor], bias: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns x (..., in) times the transposed weight, plus bias, with the operations that XNNPACK recognizes.

    weight: values and scales, as `rounding.quantize` returns them, or values, scales, offsets and their scales, as
    `rounding.quantize_groups` does; the product with the offsets is the caller's.
    """
    values, scales = weight[:2]
    zeros = torch.zeros(scales.shape, dtype=torch.int64)
    bounds = (scheme.smallest, scheme.largest, torch.int8)
    if scheme.group:
        floats = _quantized.dequantize_per_channel_group(values, scales, zeros, *bounds, scheme.group, torch.float32)
    else:
        floats = _quantized.dequantize_per_channel(values, scales, zeros, 0, *bounds)
    return functional.linear(quantized_tokens(x) if scheme.dynamic else x, floats, bias)


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
    if name.endswith((OFFSET, OFFSET + SCALE)):
        scheme = ROWS
    if scheme is not None and name.endswith(SCALE) and scheme.group:
        tensor = tensor.to(torch.bfloat16).view(torch.int16)
    elif scheme is not None and tensor.dtype == torch.int8 and scheme.bits == 4:
        nibbles = (tensor + 8).to(torch.uint8).reshape(-1)
        tensor = nibbles[1::2] << 4 | nibbles[::2]
    return bytes(tensor.contiguous().numpy().data)
