"""An export-friendly Llama decoder layer with MP-LoRA (paper, Section 3.2).

Every operation is one that XNNPACK takes whole: the causal mask is a constant (right padding, no mask input),
grouped-query attention reshapes queries instead of copying keys, the norm's mean is a linear layer of 1/hidden.
Knows its own shapes; knows nothing of losses, noise, flat B or files.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.base import BaseFacts
from shared.recipe import TARGETS, Recipe, Target

MASKED = -1e9  # added to a score that causality forbids; its softmax is exactly 0 in float32


@dataclass(frozen=True)
class LayerShape:
    """What one decoder layer is compiled for."""

    facts: BaseFacts
    paths: int  # n: copies of B, each for its own rows
    rows: int  # R: sequences, path-major
    sequence: int  # S
    rank: int
    targets: tuple[Target, ...]

    @property
    def slab(self) -> int:
        """Elements of flat B that one layer holds."""
        return sum(self.rank * self.facts.features(target)[1] for target in self.targets)


def layer_shape(recipe: Recipe, facts: BaseFacts) -> LayerShape:
    """The layer that both `step` and `score` of a recipe run: R = 2 q E rows, n = 2 q paths."""
    return LayerShape(facts, recipe.paths, recipe.score_rows, recipe.sequence_length, recipe.rank, recipe.targets)


class RmsNorm(nn.Module):
    """Root-mean-square norm. Its mean is a linear layer of 1/hidden with bias eps, which XNNPACK packs."""

    def __init__(self, facts: BaseFacts) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, facts.hidden), 1.0 / facts.hidden), persistent=False)
        self.register_buffer("eps", torch.full((1,), facts.norm_eps), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., hidden) scaled to unit root mean square, times weight (hidden,)."""
        return x * torch.rsqrt(functional.linear(x * x, self.mean, self.eps)) * weight


class LayerTables(nn.Module):
    """Constants that all layers share: rotary angles and the causal mask."""

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        facts = shape.facts
        exponents = torch.arange(0, facts.head_dim, 2, dtype=torch.int64).to(torch.float32) / facts.head_dim
        angles = torch.outer(torch.arange(shape.sequence, dtype=torch.float32), 1.0 / facts.rope_theta**exponents)
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)  # (S, 1, head_dim / 2)
        scale = facts.head_dim**-0.5  # of attention, folded into the queries' rotation
        causal = torch.full((shape.sequence, shape.sequence), MASKED).triu(1)
        constants = {
            "query_cos": cos * scale,
            "query_sin": sin * scale,
            "key_cos": cos,
            "key_sin": sin,
            "causal": causal.repeat(facts.heads // facts.kv_heads, 1).unsqueeze(0),  # (1, G*S, S)
        }
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)

    def forward(self) -> tuple[Tensor, ...]:
        """The tables, in the order in which a layer takes them."""
        return self.query_cos, self.query_sin, self.key_cos, self.key_sin, self.causal


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (R, S, heads, head_dim) turned by its positions' angles; first and second halves are the pairs."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class DecoderLayer(nn.Module):
    """One layer of a Llama decoder; adapted linear layers compute y = x W^T + (alpha / r) (x A) B_p.

    Its own constants are linear layers' weights only: XNNPACK packs those, so the runtime may drop the originals.
    Norm weights and tables are inputs, because the runtime's weight cache frees what a delegate did not pack.
    """

    def __init__(self, shape: LayerShape, weights: Mapping[Target, Tensor], scaled_a: Mapping[Target, Tensor]) -> None:
        """weights: the seven linear layers' (out, in) by name; scaled_a: (alpha / r) A^T, (r, in), by target."""
        super().__init__()
        self.shape = shape
        for target in TARGETS:
            self.register_buffer(target, weights[target])
        for target in shape.targets:
            self.register_buffer(f"{target}_a", scaled_a[target])
        self.norm = RmsNorm(shape.facts)

    def forward(self, hidden: Tensor, slab: Tensor, input_norm: Tensor, post_norm: Tensor, *tables: Tensor) -> Tensor:
        """hidden (R, S, hidden), slab (n, slab): this layer's B of every path. Returns (R, S, hidden)."""
        b = self._factors(slab)
        hidden = hidden + self._attention(self.norm(hidden, input_norm), b, tables)
        x = self.norm(hidden, post_norm)
        gate = self._linear("gate_proj", x, b)
        up = self._linear("up_proj", x, b)
        return hidden + self._linear("down_proj", gate * torch.sigmoid(gate) * up, b)

    def _factors(self, slab: Tensor) -> dict[str, Tensor]:
        """Each target's B of every path, (n, r, out)."""
        ends = list(accumulate(self.shape.rank * self.shape.facts.features(target)[1] for target in self.shape.targets))
        # A slice of everything would be exported as an alias, which XNNPACK does not take.
        parts = [slab[:, start:end] for start, end in pairwise([0, *ends])] if len(ends) > 1 else [slab]
        return {
            target: part.reshape(self.shape.paths, self.shape.rank, -1)
            for target, part in zip(self.shape.targets, parts, strict=True)
        }

    def _linear(self, target: Target, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        """x (R, S, in) -> (R, S, out); path p's rows meet path p's B."""
        y = functional.linear(x, getattr(self, target))
        if target not in b:
            return y
        low = functional.linear(x, getattr(self, f"{target}_a"))  # (R, S, r)
        low = low.reshape(self.shape.paths, -1, self.shape.rank)  # (n, E*S, r)
        return y + torch.bmm(low, b[target]).reshape(y.shape)

    def _attention(self, x: Tensor, b: Mapping[str, Tensor], tables: tuple[Tensor, ...]) -> Tensor:
        query_cos, query_sin, key_cos, key_sin, causal = tables
        facts, sequence = self.shape.facts, self.shape.sequence
        rows, kv, dim = self.shape.rows, facts.kv_heads, facts.head_dim
        groups = facts.heads // kv
        q = self._linear("q_proj", x, b).reshape(rows, sequence, facts.heads, dim)
        k = self._linear("k_proj", x, b).reshape(rows, sequence, kv, dim)
        v = self._linear("v_proj", x, b).reshape(rows, sequence, kv, dim)
        q = rotate(q, query_cos, query_sin).reshape(rows, sequence, kv, groups, dim)
        q = q.permute(0, 2, 3, 1, 4).reshape(rows * kv, groups * sequence, dim)
        k = rotate(k, key_cos, key_sin).permute(0, 2, 3, 1).reshape(rows * kv, dim, sequence)
        v = v.permute(0, 2, 1, 3).reshape(rows * kv, sequence, dim)
        attention = torch.softmax(torch.bmm(q, k) + causal, dim=-1)  # (R*KV, G*S, S)
        mixed = torch.bmm(attention, v).reshape(rows, kv, groups, sequence, dim)
        mixed = mixed.permute(0, 3, 1, 2, 4).reshape(rows, sequence, facts.heads * dim)
        return self._linear("o_proj", mixed, b)
