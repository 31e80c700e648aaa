"""Rounds frozen weights: rows of 8 or 4 bits with one scale each, and groups of 4 bits with a scale and an offset.

A group of 4-bit values q stands for scale * q + offset. GGUF's Q4_1 and Q4_0 have the same grid with groups of the same
size, so a base in these formats loses almost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shared.precisions import INPUT_MULTIPLES
from shared.recipe import Precision, Target

BLOCK = 1 << 19  # elements of a weight that are rounded at once: they stay in a cache
SCALE = "_scale"  # suffix of the names of scales
OFFSET = "_offset"  # suffix of the names of the groups' offsets
TINY = torch.finfo(torch.float32).tiny  # XNNPACK requires scales that are normal numbers
# Steps that are tried for a row, relative to the step that clips nothing: a finer grid is worth some clipping.
FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6)
# Steps that are tried between the least and the largest weight of a group, which has 15. With more, both ends are
# clipped. With fewer, a weight from a file of 4 bits whose group does not use all values lies on the grid.
SPANS = (15, 14, 13, 12, 11, 10, 9, 8, 16, 17, 18, 20, 22, 24)


@dataclass(frozen=True)
class Scheme:
    """A quantization scheme. bits: per stored value. group: input features per scale; None: one scale per row."""

    bits: int
    group: int | None
    dynamic: bool  # activations are also quantized

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
    "int4": Scheme(4, INPUT_MULTIPLES["int4"], True),
    "int8-weight": Scheme(8, None, False),
    "int4-weight": Scheme(4, None, False),
}
FLOAT_INPUTS: dict[Precision, frozenset[Target]] = {"int8": frozenset({"down_proj"})}
ROWS = Scheme(8, None, False)  # embedding tables, lm_head and the offsets of groups


def target_scheme(precision: Precision, target: Target) -> Scheme | None:
    """Returns the scheme of one linear layer, or None for float32."""
    scheme = SCHEMES.get(precision)
    if scheme is not None and target in FLOAT_INPUTS.get(precision, ()):
        return replace(scheme, dynamic=False)
    return scheme


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns values int8 (out, in) and one scale per row, float32 (out,), of a weight, float32 (out, in).

    Rounding is symmetric, to nearest. The largest weight of an 8-bit row is the largest value; a row of 4 bits gets
    the scale with the least squared error.
    """
    values, scales = torch.empty(weight.shape, dtype=torch.int8), torch.empty(len(weight))
    for part in _parts(weight):
        rows = weight[part]
        largest = (rows.abs().amax(dim=1, keepdim=True) / scheme.largest).clamp(min=TINY)
        scale = largest if scheme.bits == 8 else _row_scales(rows, largest, scheme)
        values[part], scales[part] = _rounded(rows / scale, scheme).to(torch.int8), scale.squeeze(1)
    return values, scales


def quantize_groups(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns values int8 (out, in), scales float32 (out, groups), and each group's offset: int8 (out, groups) and one
    scale per row, float32 (out,).

    The scale is the one with the least squared error. It is a bfloat16 number, as XNNPACK stores it.
    """
    assert scheme.group is not None  # noqa: S101  # the caller chose a scheme with groups
    rows, columns = weight.shape
    values, scales = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, columns // scheme.group)
    offsets, offset_scales = torch.empty(scales.shape, dtype=torch.int8), torch.empty(rows)
    for part in _parts(weight):
        blocks = weight[part].reshape(-1, columns // scheme.group, scheme.group)
        scale, offset = _group_grid(blocks, scheme)
        offsets[part], offset_scales[part] = quantize(offset.squeeze(2), ROWS)
        offset = dequantize(offsets[part], offset_scales[part]).unsqueeze(2)
        values[part] = _rounded((blocks - offset) / scale, scheme).to(torch.int8).reshape(-1, columns)
        scales[part] = scale.squeeze(2)
    return values, scales, offsets, offset_scales


def quantized(name: str, weight: Tensor, scheme: Scheme) -> dict[str, Tensor]:
    """Returns the buffers of a linear weight (out, in), by name; see `quantize` and `quantize_groups`."""
    if scheme.group is None:
        values, scales = quantize(weight, scheme)
        return {name: values, name + SCALE: scales}
    values, scales, offsets, offset_scales = quantize_groups(weight, scheme)
    return {name: values, name + SCALE: scales, name + OFFSET: offsets, name + OFFSET + SCALE: offset_scales}


def dequantize(
    values: Tensor, scales: Tensor, offsets: Tensor | None = None, offset_scales: Tensor | None = None
) -> Tensor:
    """Returns the float32 weight (out, in) that the buffers of `quantized` represent."""
    rows = len(values)
    groups = values.reshape(rows, scales[0].numel(), -1) * scales.reshape(rows, -1, 1)
    if offsets is not None and offset_scales is not None:
        groups = groups + dequantize(offsets, offset_scales).unsqueeze(2)
    return groups.reshape(values.shape)


def _parts(weight: Tensor) -> list[slice]:
    """Returns slices of rows whose intermediate results fit in memory together."""
    step = max(1, BLOCK // weight.shape[1])
    return [slice(at, at + step) for at in range(0, len(weight), step)]


def _rounded(steps: Tensor, scheme: Scheme) -> Tensor:
    return steps.round_().clamp_(scheme.smallest, scheme.largest)


def _row_scales(rows: Tensor, largest: Tensor, scheme: Scheme) -> Tensor:
    """Returns the scale (rows, 1) with the least squared error. largest: the scale that clips nothing."""
    best, least = largest, torch.full_like(largest, torch.inf)
    for fraction in FRACTIONS:
        scale = largest * fraction
        values = _rounded(rows / scale, scheme)
        # The best scale of these values, by least squares; a row of zeros has none.
        norm = (values * values).sum(1, keepdim=True)
        scale = torch.where(norm > 0, (values * rows).sum(1, keepdim=True) / norm.clamp(min=1), scale).clamp(min=TINY)
        error = (values * scale - rows).square_().sum(1, keepdim=True)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _group_grid(blocks: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Returns the scale and offset (rows, groups, 1) with the least squared error. blocks: (rows, groups, group)."""
    low, high = blocks.amin(dim=2, keepdim=True), blocks.amax(dim=2, keepdim=True)
    middle = (high + low) / 2
    best = least = torch.full_like(middle, torch.inf)
    offsets, centred = middle, blocks - middle
    values, rest = torch.empty_like(blocks), torch.empty_like(blocks)  # reused: new memory costs more than arithmetic
    for span in SPANS:
        scale = ((high - low) / span).clamp(min=TINY).to(torch.bfloat16).to(torch.float32)
        # An odd number of steps has its middle between two values.
        _rounded(torch.div(centred, scale, out=values).sub_(0.5 * (span % 2)), scheme)
        torch.sub(blocks, torch.mul(values, scale, out=rest), out=rest)
        offset = rest.mean(dim=2, keepdim=True)
        error = rest.sub_(offset).square_().sum(2, keepdim=True)
        better = error < least
        best, offsets = torch.where(better, scale, best), torch.where(better, offset, offsets)
        least = torch.minimum(error, least)
    return best, offsets
