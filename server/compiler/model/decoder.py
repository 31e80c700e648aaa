"""One decoder layer that can be exported, with MP-LoRA (paper, Section 3.2). `LayerShape` has its sizes.

XNNPACK takes every operation: the causal mask is an input made of constants (right padding), grouped-query attention
reshapes queries instead of copying keys, and a norm's mean is a linear layer of 1/size. No shape names the sequence
length, so that one lowered layer runs every length up to the planned one.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.checkpoints.base import AttentionKind, BaseFacts, NormPlace, Rope
from server.compiler.model.convolution import ConvolutionTables, convolution
from server.compiler.model.layer_inputs import AttentionTables, LayerInputs, Norms
from server.compiler.model.quantization import linear
from server.compiler.model.rounding import OFFSET, ROWS, SCALE, SCHEMES, Scheme, quantized, target_scheme
from shared.program import kept_products
from shared.recipe import Precision, Recipe, Target

MASKED = -1e9  # added to a score that causality forbids; its softmax is exactly 0 in float32


@dataclass(frozen=True)
class LayerShape:
    """The properties that one decoder layer is compiled for. Layers of equal shape are one graph."""

    facts: BaseFacts
    precision: Precision
    paths: int  # n: copies of B, each for its own rows
    rows: int  # R: sequences, path-major
    rank: int
    targets: tuple[Target, ...]  # adapted here; none in a frozen layer
    picks: int = 0  # T: positions of a sequence that the last layer is computed at; 0: all
    kept: tuple[Target, ...] = ()  # whose outputs a step keeps for its reverse pass, of those it may compute again

    def __hash__(self) -> int:
        return hash((self.precision, self.paths, self.rows, self.rank, self.targets, self.picks))

    @property
    def scheme(self) -> Scheme | None:
        """How frozen weights are held; None: float32."""
        return SCHEMES.get(self.precision)

    @property
    def scales_rows(self) -> bool:
        """Whether each row of a frozen weight has one scale, which a transposed product takes with the gradient."""
        return self.scheme is not None and self.scheme.group is None

    @property
    def slab(self) -> int:
        """Elements of flat B that this layer holds."""
        return sum(self.rank * self.facts.features(target)[1] for target in self.targets)

    @property
    def outputs(self) -> int:
        """Outputs of all linear layers."""
        return sum(self.facts.features(target)[1] for target in self.facts.linears)


def layer_shapes(
    recipe: Recipe, facts: BaseFacts, rows: int, paths: int, adapted: bool = True, picks: int = 0
) -> list[LayerShape]:
    """Every layer of the base for `rows` sequences of `paths` paths; with `adapted` False none meets its B.

    picks: of the last layer; see `LayerShape`.
    """
    adapted_layers = set(recipe.adapted_layers(facts.layers)) if adapted else set()
    whole = LayerShape(facts, recipe.precision, paths, rows, recipe.rank, (), kept=kept_products(recipe, facts))
    shapes = [
        replace(whole, facts=kind, targets=recipe.targets if index in adapted_layers else ())
        for index, kind in enumerate(facts.of_layers())
    ]
    return [*shapes[:-1], replace(shapes[-1], picks=picks)]


class RmsNorm(nn.Module):
    """Root-mean-square norm. Its mean is a linear layer of 1/size with bias eps, which XNNPACK packs."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((1, size), 1.0 / size), persistent=False)
        self.register_buffer("eps", torch.full((1,), eps), persistent=False)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., size) scaled to unit root mean square, times weight (size,)."""
        return x * torch.rsqrt(functional.linear(x * x, self.mean, self.eps)) * weight


class LayerNorm(nn.Module):
    """Layer norm: the root-mean-square norm of what is left when the mean is taken away."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.rms = RmsNorm(size, eps)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """x (..., size) centred and scaled to unit variance, times weight, plus bias, both (size,)."""
        return self.rms(x - functional.linear(x, self.rms.mean), weight) + bias


def norm_of(facts: BaseFacts) -> RmsNorm | LayerNorm:
    """The norm over hidden states that the base uses."""
    return (LayerNorm if facts.norm == "layer" else RmsNorm)(facts.hidden, facts.norm_eps)


def rotary_angles(facts: BaseFacts, kind: AttentionKind, places: Tensor, bound: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines (places, head_dim / 2) of the angles that queries and keys at `places` are turned by.

    Pairs of features that the base does not rotate are turned by nothing. bound: the longest text, tokens.
    """
    pairs, places = facts.head_dim // 2, places.to(torch.float32)
    if kind.rope is None:
        return torch.ones(len(places), pairs), torch.zeros(len(places), pairs)
    frequencies = inverse_frequencies(kind.rope, facts.rotary_dim or facts.head_dim, bound)
    angles = torch.outer(places, frequencies)
    cos, sin = angles.cos(), angles.sin()
    if kind.rope.attention_factor != 1.0:
        cos, sin = cos * kind.rope.attention_factor, sin * kind.rope.attention_factor
    still = pairs - len(frequencies)
    return functional.pad(cos, (0, still), value=1.0), functional.pad(sin, (0, still))


def inverse_frequencies(rope: Rope, rotary_dim: int, bound: int = 0) -> Tensor:
    """Radians per token of each rotated pair of a head's features, float32 (rotary_dim / 2,).

    bound: the longest text, tokens, by which LongRoPE chooses its factors.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "factors":
        long = rope.long_factors and bound > rope.original_context
        return frequencies / torch.tensor(rope.long_factors if long else rope.factors)
    if rope.kind == "yarn":
        first, last = rope.ramp
        stretched_share = ((torch.arange(rotary_dim // 2) - first) / (last - first)).clamp(0, 1)
        return frequencies / rope.factor * stretched_share + frequencies * (1 - stretched_share)
    # Llama 3: long waves are stretched by the factor, short ones kept, those between blended.
    turns = rope.original_context * frequencies / (2 * math.pi)  # of each wave within the original context
    unscaled_share = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return unscaled_share * frequencies + (1 - unscaled_share) * frequencies / rope.factor


def upper_tail(x: Tensor) -> Tensor:
    """The normal distribution's share above x >= 0, to 1e-7 (Abramowitz and Stegun, 1964, 7.1.26)."""
    stretched = x * (0.3275911 / math.sqrt(2)) + 1.0
    t = torch.rsqrt(stretched * stretched)  # XNNPACK has no reciprocal
    polynomial = t * 1.061405429 + -1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        polynomial = polynomial * t + coefficient
    return polynomial * t * torch.exp(x * x * -0.5) * 0.5


class LayerTables(nn.Module):
    """Constants that all layers of one attention kind share: rotary angles, the mask, and attention's numbers.

    Each is one token longer than the bound: an exporter takes a slice of the whole for no slice.
    """

    def __init__(self, facts: BaseFacts, bound: int, kind: int = 0, masked: bool = True) -> None:
        """bound: the longest sequence, tokens. kind: index of the kind of attention.

        masked: with the mask, whose size is the square of the bound.
        """
        super().__init__()
        self.heads, self.kv_heads, self.groups = facts.heads, facts.kv_heads, facts.heads // facts.kv_heads
        self.rotary = not facts.learned_positions
        self.window = facts.attention[kind].window
        self.capped = facts.attention_softcap is not None
        size = bound + 1
        at = torch.arange(size)
        constants = {"scale": torch.full((1,), facts.attention_scale)}
        if self.rotary:
            cos, sin = rotary_angles(facts, facts.attention[kind], at, bound)
            constants["cos"], constants["sin"] = cos.unsqueeze(1), sin.unsqueeze(1)
        if self.capped:
            constants["cap"] = torch.full((1,), facts.attention_softcap)
            constants["uncap"] = 1.0 / constants["cap"]
        if masked:
            hidden = at.unsqueeze(0) > at.unsqueeze(1)
            if self.window is not None:
                hidden |= at.unsqueeze(0) <= at.unsqueeze(1) - self.window
            constants["mask"] = torch.zeros(size, size).masked_fill(hidden, MASKED)
        for name, constant in constants.items():
            self.register_buffer(name, constant, persistent=False)

    def forward(self, length: int, rows: int) -> tuple[Tensor, ...]:
        """The tables for `rows` sequences of `length`, in the order in which a layer takes them."""
        mask = self.mask[:length, :length].repeat(self.groups, 1).unsqueeze(0)  # (1, G*S, S)
        return mask, *self._others(length)

    def picked(self, length: int, positions: Tensor) -> tuple[Tensor, ...]:
        """The tables of a layer whose queries are at `positions` (R, T) alone."""
        rows, picks = positions.shape
        places = positions.reshape(-1).to(torch.int64)
        mask = self.mask.index_select(0, places)[:, :length].reshape(rows, 1, picks, -1)
        mask = mask.repeat(1, self.heads, 1, 1).view(rows * self.kv_heads, self.groups * picks, -1)
        angles = (self.cos, self.sin) if self.rotary else ()
        of_queries = (table.index_select(0, places).view(rows, picks, 1, -1) for table in angles)
        return mask, *self._others(length), *of_queries

    def _others(self, length: int) -> tuple[Tensor, ...]:
        """The tables besides the mask."""
        rotary = (self.cos[:length], self.sin[:length]) if self.rotary else ()  # (S, 1, head_dim / 2)
        caps = (self.cap, self.uncap) if self.capped else ()
        return self.scale, *rotary, *caps


def all_tables(facts: BaseFacts, bound: int) -> list[nn.Module]:
    """The tables of each kind of layer, as `BaseFacts.kind` numbers them. bound: the longest sequence, tokens."""
    tables: list[nn.Module] = [LayerTables(facts, bound, kind) for kind in range(len(facts.attention))]
    return [*tables, ConvolutionTables(facts, bound)] if facts.conv_layers else tables


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (R, S, heads, head_dim) turned by its positions' angles; first and second halves are the pairs."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FrozenLinears(nn.Module):
    """A decoder layer's frozen linear layers, in the layer's precision, under the names that files know."""

    def __init__(self, shape: LayerShape, weights: Mapping[str, Tensor]) -> None:
        """weights: buffers as `quantized_layer` gives them."""
        super().__init__()
        self.schemes = {target: target_scheme(shape.precision, target) for target in shape.facts.linears}
        for name, tensor in weights.items():
            self.register_buffer(name, tensor)
        for target in shape.facts.biases:
            scheme, bias = self.schemes[target], weights.get(f"{target}_bias")  # a part of a layer has not all of them
            if scheme is not None and not scheme.dynamic and bias is not None:
                self.register_buffer(f"{target}_bias_zeros", torch.zeros(len(bias), 1), persistent=False)
        if shape.scheme is not None and shape.scheme.group:
            self.register_buffer("ones", torch.ones(1, shape.scheme.group), persistent=False)

    def forward(self, target: Target, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out)."""
        weight, bias = getattr(self, target), getattr(self, f"{target}_bias", None)
        scheme = self.schemes[target]
        if scheme is None:
            return functional.linear(x, weight, bias)
        scaled = weight, getattr(self, target + SCALE)
        if scheme.group:
            return linear(x, scaled, bias, scheme) + self._offset(target, x, scheme.group)
        if scheme.dynamic or bias is None:
            return linear(x, scaled, bias, scheme)
        # XNNPACK's weight-only kernels take no bias: it is a linear layer of its own, whose weights are zero.
        zeros = getattr(self, f"{target}_bias_zeros")
        return linear(x, scaled, None, scheme) + functional.linear(x[..., :1], zeros, bias)

    def _offset(self, target: Target, x: Tensor, group: int) -> Tensor:
        """Returns what the groups' offsets add to x (R, S, in) times the weight: (R, S, out).

        XNNPACK's groups of 4 bits have no offset. All inputs of a group meet the same one, so their sum is enough.
        """
        name, (rows, _, features) = target + OFFSET, x.shape
        sums = functional.linear(x.view(rows, -1, features // group, group), self.ones)
        offsets = getattr(self, name), getattr(self, name + SCALE)
        return linear(sums.view(rows, -1, features // group), offsets, None, ROWS)


def quantized_layer(weights: Mapping[str, Tensor], precision: Precision) -> dict[str, Tensor]:
    """A layer's linear weights (out, in) and biases (out,) by name, as buffers of that precision."""
    scheme = SCHEMES.get(precision)
    if scheme is None:
        return dict(weights)
    buffers: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if tensor.dim() == 2:
            buffers |= quantized(name, tensor, scheme)
        else:
            buffers[name] = tensor
    return buffers


class Factors(dict[str, Tensor]):
    """Each target's B of every path, (n, r, out).

    `low` collects the (alpha / r) x A that they are multiplied by, `outputs` what all linear layers return.
    """

    def __init__(self, b: Mapping[str, Tensor] | None = None) -> None:
        super().__init__(b or {})
        self.low: dict[Target, Tensor] = {}  # (R, S, r)
        self.outputs: dict[Target, Tensor] = {}  # (R, S, out)


class DecoderLayer(nn.Module):
    """One decoder layer; adapted linear layers compute y = x W^T + (alpha / r) (x A) B_p.

    Its own constants are linear layers' only: XNNPACK packs those, so the runtime may drop the originals. Norm weights
    and tables are inputs, because the runtime's weight cache frees what a delegate did not pack.
    """

    def __init__(self, shape: LayerShape, weights: Mapping[str, Tensor], scaled_a: Mapping[Target, Tensor]) -> None:
        """weights: buffers as `quantized_layer` gives them; scaled_a: (alpha / r) A^T, (r, in), by target."""
        super().__init__()
        self.shape = shape
        self.frozen = FrozenLinears(shape, weights)
        for target in shape.targets:
            self.register_buffer(f"{target}_a", scaled_a[target])
        facts = shape.facts
        self.norm = norm_of(facts)
        if facts.qk_norm == "head":
            self.head_norm = RmsNorm(facts.head_dim, facts.norm_eps)
        elif facts.qk_norm == "width":
            self.q_norm, self.k_norm = (
                RmsNorm(facts.head_norm_size(name), facts.norm_eps) for name in facts.head_norms
            )

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """hidden (R, S, hidden) -> (R, S, hidden). others: those of `LayerInputs`.

        With picks, `others` begins with the states at the picks, and the result has these alone: both (R, T, hidden).
        """
        picked, others = (others[0], others[1:]) if self.shape.picks else (hidden, others)
        inputs, b = self.inputs(others)
        x = self.norm_at("input_norm", hidden, inputs.norms)
        query_input = self.norm_at("input_norm", picked, inputs.norms) if self.shape.picks else x
        q, k, v = self.heads(x, b, inputs.head_norms, inputs.tables, query_input)
        mixed = self._linear("o_proj", self.mix(q, k, v, inputs.tables), b)
        return self.finish(picked, mixed, b, inputs.norms)

    def inputs(self, others: Sequence[Tensor]) -> tuple[LayerInputs, Factors]:
        """The inputs of `forward` by name, and each target's B of every path."""
        shape = self.shape
        inputs = LayerInputs.of(shape.facts, others, adapted=bool(shape.targets), picked=bool(shape.picks))
        return inputs, self._factors(inputs.slab) if shape.targets else Factors()

    def norm_at(self, name: NormPlace, x: Tensor, norms: Norms) -> Tensor:
        """x (R, S, hidden) normed as the base norms it there; x itself if it does not."""
        return self.norm(x, *norms[name]) if name in norms else x

    def residual(self, x: Tensor) -> Tensor:
        """x (R, S, hidden) as it is added to the hidden states."""
        scale = self.shape.facts.residual_scale
        return x if scale == 1.0 else x * scale

    @property
    def mlp_norm(self) -> NormPlace:
        """The norm of the MLP's input."""
        return "input_norm" if self.shape.facts.parallel and "post_norm" not in self.shape.facts.norms else "post_norm"

    def finish(self, hidden: Tensor, mixed: Tensor, b: Mapping[str, Tensor], norms: Norms) -> Tensor:
        """The layer after attention's output `mixed`, both (R, S, hidden). norms: at least `finishing_norms`."""
        attended = hidden + self.residual(self.norm_at("attention_out_norm", mixed, norms))
        mlp_input = self.norm_at(self.mlp_norm, hidden if self.shape.facts.parallel else attended, norms)
        return attended + self.residual(self.norm_at("mlp_out_norm", self._mlp(mlp_input, b), norms))

    def _factors(self, slab: Tensor) -> Factors:
        """Each target's B of every path."""
        ends = list(accumulate(self.shape.rank * self.shape.facts.features(target)[1] for target in self.shape.targets))
        # A slice of everything would be exported as an alias, which XNNPACK does not take.
        parts = [slab[:, start:end] for start, end in pairwise([0, *ends])] if len(ends) > 1 else [slab]
        by_target = zip(self.shape.targets, parts, strict=True)
        return Factors({target: part.reshape(self.shape.paths, self.shape.rank, -1) for target, part in by_target})

    def _linear(self, target: Target, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        """x (R, S, in) -> (R, S, out); path p's rows meet path p's B."""
        y = self.frozen(target, x)
        if target in b:
            low = functional.linear(x, getattr(self, f"{target}_a"))
            if isinstance(b, Factors):
                b.low[target] = low
            low = low.view(self.shape.paths, -1, self.shape.rank)  # (n, E*S, r)
            y = y + torch.bmm(low, b[target]).view(self.shape.rows, -1, y.shape[-1])
        if isinstance(b, Factors):
            b.outputs[target] = y
        return y

    def _mlp(self, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        facts = self.shape.facts
        up = self._linear("up_proj", x, b)
        if not facts.gated:
            return self._linear("down_proj", self._activate(up), b)
        return self._linear("down_proj", self._activate(self._linear("gate_proj", x, b)) * up, b)

    def _activate(self, x: Tensor) -> Tensor:
        kind = self.shape.facts.activation
        if kind == "relu":
            return torch.relu(x)
        if kind == "relu2":
            rectified = torch.relu(x)
            return rectified * rectified
        if kind == "silu":
            return x * torch.sigmoid(x)
        if kind == "gelu":
            magnitude = torch.abs(x)
            return torch.relu(x) - magnitude * upper_tail(magnitude)
        # 0.5 x (1 + tanh y) is x sigmoid(2 y)
        return x * torch.sigmoid((x * x * x * 0.044715 + x) * (2 * math.sqrt(2 / math.pi)))

    def heads(
        self,
        x: Tensor,
        b: Mapping[str, Tensor],
        head_norms: Sequence[Tensor],
        tables: AttentionTables,
        query_input: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scaled queries (R, S, heads, head_dim), keys and values (R, S, kv_heads, head_dim), rotated; x (R, S, in).

        query_input: (R, T, in), the queries' own input; None: x. Of a convolution: the output gate (R, S, 1, hidden),
        the input gate and the input, as they are.
        """
        facts, rows = self.shape.facts, self.shape.rows
        q = self._linear("q_proj", x if query_input is None else query_input, b)
        if facts.qk_norm == "width":
            q = self.q_norm(q, head_norms[0])
        q = q.view(rows, -1, facts.heads, facts.head_dim)
        k = self._linear("k_proj", x, b)
        if facts.qk_norm == "width":
            k = self.k_norm(k, head_norms[1])
        k = k.view(rows, -1, facts.kv_heads, facts.head_dim)
        v = self._linear("v_proj", x, b).view(rows, -1, facts.kv_heads, facts.head_dim)
        if facts.convolves:
            return q, k, v
        if facts.qk_norm == "head" and not facts.qk_norm_after_rope:
            q, k = self.head_norm(q, head_norms[0]), self.head_norm(k, head_norms[1])
        if not facts.learned_positions:
            q, k = rotate(q, *tables.query_angles), rotate(k, tables.cos, tables.sin)
        if facts.qk_norm == "head" and facts.qk_norm_after_rope:
            q, k = self.head_norm(q, head_norms[0]), self.head_norm(k, head_norms[1])
        return q * tables.scale, k, v

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables) -> Tensor:
        """Attention of q (R, S, heads, head_dim) over k, v (R, K, kv_heads, head_dim): (R, S, heads * head_dim).

        Or the gated convolution of what `heads` returns, (R, S, hidden).
        """
        facts, rows = self.shape.facts, self.shape.rows
        if facts.convolves:
            gate, *gated = (each.view(rows, -1, facts.hidden) for each in (q, k, v))
            return gate * convolution(gated[0] * gated[1], tables)
        kv, dim = facts.kv_heads, facts.head_dim
        groups = facts.heads // kv
        # Contiguous copies and views, not reshapes: those would write the sequence length down.
        q = q.view(rows, -1, kv, groups, dim).permute(0, 2, 3, 1, 4).contiguous().view(rows * kv, -1, dim)
        k = k.permute(0, 2, 3, 1).contiguous().view(rows * kv, dim, -1)
        v = v.permute(0, 2, 1, 3).contiguous().view(rows * kv, -1, dim)
        mixed = self.attend(q, k, v, tables).view(rows, kv, groups, -1, dim)
        return mixed.permute(0, 3, 1, 2, 4).contiguous().view(rows, -1, facts.heads * dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables) -> Tensor:
        """Attention by key-value head: q (R*KV, G*S, head_dim), k (R*KV, head_dim, K), v (R*KV, K, head_dim), as q."""
        scores = torch.bmm(q, k)  # (R*KV, G*S, K)
        if self.shape.facts.attention_softcap is not None:
            scores = torch.tanh(scores * tables.uncap) * tables.cap
        return torch.bmm(torch.softmax(scores + tables.mask, dim=-1), v)
