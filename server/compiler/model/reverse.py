"""A decoder layer's reverse pass as a forward graph: most of the layer again, then its vector-Jacobian product.

An engine without automatic differentiation runs it like any other layer. The products are reverse-mode differentiation
by hand (Rumelhart, Hinton and Williams, 1986). Of the forward pass a layer's input and what `Kept` names are kept, and
the rest is computed again (checkpointing, Chen et al., 2016, arXiv 1604.06174).
`torch.addmm(bias, dy, W)` reads W (out, in) as the forward pass stores it; XNNPACK packs the same bytes transposed, so
the weights file does not change. Weights in groups are the exception, see `transposed_groups`.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.checkpoints.base import NormPlace
from server.compiler.model.convolution import Convolution
from server.compiler.model.decoder import DecoderLayer, Factors, FrozenLinears, LayerShape, RmsNorm, rotate
from server.compiler.model.layer_inputs import LayerInputs
from server.compiler.model.pointwise_reverse import activation, norm_output, norm_reverse, normed, rotate_back
from server.compiler.model.quantization import quantized_tokens, transposed_weight
from server.compiler.model.rounding import OFFSET, SCALE, SCHEMES, dequantize, quantized
from shared.recipe import Target


def no_bias(size: int) -> Tensor:
    """A bias (size,) that adds nothing and has other bytes than any bias of a base: negative zeros.

    ExecuTorch's weight cache names packed weights by the keys of weight and bias. With a bias of its own, a transposed
    packing can never be found in place of the forward one.
    """
    return torch.full((size,), -0.0)


@dataclass
class Reversal:
    """The tensors that one reverse pass reads and collects, by target."""

    b: Factors  # (1, r, out), and x A of the forward pass, (E, S, r)
    scales: Mapping[str, Tensor]  # (out,) of quantized weights
    gradients: dict[Target, Tensor] = field(default_factory=dict)  # (E, r, out), one of each example


class TransposedLinears(nn.Module):
    """Products of gradients (N, out) with a layer's frozen linear weights (out, in).

    Quantized weights are int8 with a scale for each output. The scales are folded into the gradient, which is then
    quantized per token; so weights of int8 and of int8-weight are multiplied alike.
    """

    def __init__(self, shape: LayerShape, weights: Mapping[str, Tensor]) -> None:
        """weights: buffers as `quantized_layer` gives them; a quantized one has a second buffer here.

        A value of XNNPACK's has one axis of scales: the forward product's is the other one.
        """
        super().__init__()
        self.quantized = shape.scheme is not None
        for target in shape.facts.linears:
            features = shape.facts.features(target)[0]
            self.register_buffer(f"{target}_bias", no_bias(features), persistent=False)
            if self.quantized:
                self.register_buffer(target, weights[target])

    def forward(self, target: Target, gradient: Tensor, weight: Tensor | None, scale: Tensor | None) -> Tensor:
        """gradient (N, out) -> (N, in). weight: (out, in) in float32, else None; scale: (out,) of a quantized one."""
        bias = getattr(self, f"{target}_bias")
        if scale is None:
            assert weight is not None  # noqa: S101  # one of both is given
            return torch.addmm(bias, gradient, weight)
        values = getattr(self, target)
        return torch.addmm(bias, quantized_tokens(gradient * scale), transposed_weight(values))


def transposed_groups(shape: LayerShape, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The transposed linear weights (in, out) of a layer in groups along `out`, as buffers.

    In a transposed product the groups' scales lie along the axis that is summed over, so that no kernel can read the
    values of the forward product. This copy is rounded once more, from the weights that the forward product has.
    """
    copies: dict[str, Tensor] = {}
    for target in shape.facts.linears:
        names = (target, target + SCALE, target + OFFSET, target + OFFSET + SCALE)
        weight = dequantize(*(weights[name] for name in names))
        copies |= quantized(target, weight.t().contiguous(), SCHEMES[shape.precision])
    return copies


@dataclass(frozen=True)
class Kept:
    """What a layer keeps of its forward pass besides its input, so that its reverse pass does not compute it again."""

    mixed: Tensor  # the output of attention or of the convolution, (E, S, hidden)
    values: Tensor  # (E, S, kv_heads * head_dim)
    keys: Tensor | None  # rotated, as values; None with head norms, whose reverse needs the keys before them
    low: Tensor | None  # (alpha / r) x A of all targets side by side, (E, S, targets * r); None in a layer without B
    outputs: Mapping[Target, Tensor]  # of the shape's `kept` linear layers, (E, S, out)

    @staticmethod
    def widths(shape: LayerShape) -> tuple[int, ...]:
        """The last dimension of each tensor. A layer with picks keeps nothing: few positions are computed again."""
        facts = shape.facts
        heads = facts.kv_heads * facts.head_dim
        keys = () if facts.head_norms else (heads,)
        lows = (shape.rank * len(shape.targets),) if shape.targets else ()
        outputs = (facts.features(target)[1] for target in shape.kept)
        return () if shape.picks else (facts.hidden, heads, *keys, *lows, *outputs)

    @classmethod
    def of(cls, shape: LayerShape, tensors: Sequence[Tensor]) -> Kept:
        """Names tensors that are in the order of `widths`."""
        mixed, values, *rest = tensors
        keys = None if shape.facts.head_norms else rest.pop(0)
        low = rest.pop(0) if shape.targets else None
        return cls(mixed, values, keys, low, dict(zip(shape.kept, rest, strict=True)))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of `widths`."""
        others = (each for each in (self.keys, self.low) if each is not None)
        return self.mixed, self.values, *others, *self.outputs.values()

    def lows(self, shape: LayerShape) -> dict[Target, Tensor]:
        """(alpha / r) x A of each target, (E, S, r)."""
        if self.low is None:
            return {}
        if len(shape.targets) == 1:
            return {shape.targets[0]: self.low}
        rank = shape.rank
        return {target: self.low[..., rank * at : rank * (at + 1)] for at, target in enumerate(shape.targets)}


class KeepingLayer(DecoderLayer):
    """A decoder layer over E sequences of one path that also returns what it keeps for its reverse pass."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor | tuple[Tensor, ...]:
        """As `DecoderLayer`; the tensors of `Kept` follow, unless the layer has picks."""
        if self.shape.picks:
            return super().forward(hidden, *others)
        inputs, b = self.inputs(others)
        x, rows = self.norm_at("input_norm", hidden, inputs.norms), self.shape.rows
        q, k, v = self.heads(x, b, inputs.head_norms, inputs.tables)
        mixed = self._linear("o_proj", self.mix(q, k, v, inputs.tables), b)
        output = self.finish(hidden, mixed, b, inputs.norms)
        width = self.shape.facts.kv_heads * self.shape.facts.head_dim
        keys = None if inputs.head_norms else k.view(rows, -1, width)
        lows = [b.low[target] for target in self.shape.targets]
        low = torch.cat(lows, dim=-1) if len(lows) > 1 else (lows[0] if lows else None)
        outputs = {target: b.outputs[target] for target in self.shape.kept}
        return output, *Kept(mixed, v.view(rows, -1, width), keys, low, outputs).tensors


class ReverseLayer(KeepingLayer):
    """One decoder layer over E sequences of one path, forward and in reverse."""

    def __init__(self, shape: LayerShape, weights: Mapping[str, Tensor], scaled_a: Mapping[Target, Tensor]) -> None:
        """As `DecoderLayer`, of a shape with one path."""
        super().__init__(shape, weights, scaled_a)
        facts = shape.facts
        grouped = shape.scheme is not None and shape.scheme.group is not None
        self.transposed: nn.Module = (
            FrozenLinears(shape, transposed_groups(shape, weights)) if grouped else TransposedLinears(shape, weights)
        )
        self.grouped = grouped
        for target in shape.targets:
            self.register_buffer(f"{target}_a_bias", no_bias(facts.features(target)[0]), persistent=False)
        self.register_buffer("sum", torch.ones(1, facts.head_dim), persistent=False)

    def reverse(self, hidden: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns the gradient (E, S, hidden) of the layer's input, and B's of each example (E, slab) if it has a B.

        hidden: the layer's input, (E, S, hidden). tensors: what the forward pass kept, the gradient of the layer's
        output, (E, S, hidden), the layer's other inputs, and the scales of its linear weights, side by side, if they
        are quantized. With picks they begin with the states at the picks, whose gradient is the second result; both and
        the gradient are (E, T, hidden).
        """
        count = len(Kept.widths(self.shape)) or 1
        before, (gradient, *others) = tensors[:count], tensors[count:]
        scales = self._scales(others.pop()) if self.shape.scales_rows else {}
        inputs, b = self.inputs(others)
        reversal = Reversal(b, scales)
        gradients: tuple[Tensor, ...]
        if self.shape.picks:
            gradients = self._reverse_picked(hidden, before[0], gradient, reversal, inputs)
        else:
            kept = Kept.of(self.shape, before)
            b.low.update(kept.lows(self.shape))
            b.outputs.update(kept.outputs)
            gradients = self._reverse(hidden, kept, gradient, reversal, inputs)
        if not self.shape.targets:
            return gradients
        by_target = [reversal.gradients[target].view(self.shape.rows, -1) for target in self.shape.targets]
        return *gradients, torch.cat(by_target, dim=1) if len(by_target) > 1 else by_target[0]

    @property
    def reads_attention(self) -> bool:
        """Whether the reverse pass reads attention's output: a norm after it does, and an MLP that follows it."""
        return not self.shape.facts.parallel or "attention_out_norm" in self.shape.facts.norms

    def drop_forward(self) -> None:
        """Drops what the forward pass alone reads: without a norm after it, the MLP's output is not computed again."""
        dropped: list[Target] = [] if self.shape.picks else ["o_proj", "v_proj", *self.shape.kept]
        dropped += [] if self.reads_attention or not self.shape.picks else ["o_proj"]
        dropped += [] if self.shape.picks or self.shape.facts.head_norms else ["k_proj"]
        dropped += [] if "mlp_out_norm" in self.shape.facts.norms else ["down_proj"]
        for target in dropped:
            scaled = (target, target + SCALE, target + OFFSET, target + OFFSET + SCALE, f"{target}_bias_zeros")
            for name in (f"{target}_bias", *(() if self.shape.scheme is None else scaled)):
                if hasattr(self.frozen, name):
                    delattr(self.frozen, name)

    def _scales(self, together: Tensor) -> dict[str, Tensor]:
        """Each linear layer's scales (out,)."""
        ends = list(accumulate(self.shape.facts.features(target)[1] for target in self.shape.facts.linears))
        parts = [together[start:end] for start, end in pairwise([0, *ends])]
        return {str(target): part for target, part in zip(self.shape.facts.linears, parts, strict=True)}

    @property
    def _mixer(self) -> type[Attention | Convolution]:
        return Convolution if self.shape.facts.convolves else Attention

    def _reverse(
        self, hidden: Tensor, kept: Kept, gradient: Tensor, reversal: Reversal, inputs: LayerInputs
    ) -> tuple[Tensor]:
        """The gradient of `hidden`; B's gradients are left in `reversal`."""
        before = NormedInput(self, "input_norm", hidden, inputs)
        attention = self._mixer(self, before.output, before.output, reversal, inputs, kept)
        gradient, of_queries, of_keys = self._reverse_from(before, attention, gradient, reversal, inputs)
        return (gradient + before.reverse(of_queries + of_keys),)

    def _reverse_picked(
        self, hidden: Tensor, picked: Tensor, gradient: Tensor, reversal: Reversal, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor]:
        """The gradients of `hidden` and of `picked`; B's gradients are left in `reversal`."""
        before = NormedInput(self, "input_norm", hidden, inputs)
        picked_before = NormedInput(self, "input_norm", picked, inputs)
        query_input = picked_before.output
        attention = self._mixer(self, before.output, query_input, reversal, inputs)
        gradient, of_queries, of_keys = self._reverse_from(picked_before, attention, gradient, reversal, inputs)
        picked_gradient = gradient + picked_before.reverse(of_queries)
        return before.reverse(of_keys), picked_gradient

    def _reverse_from(
        self,
        before: NormedInput,
        attention: Attention | Convolution,
        gradient: Tensor,
        reversal: Reversal,
        inputs: LayerInputs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the layer's input `before` besides attention's, and of attention's two inputs.

        gradient: of the output.
        """
        facts = self.shape.facts
        after = NormedInput(self, "attention_out_norm", attention.output, inputs)
        if facts.parallel:
            inner = before if self.mlp_norm == "input_norm" else NormedInput(self, "post_norm", before.input, inputs)
        else:
            inner = NormedInput(self, "post_norm", before.input + self.residual(after.output), inputs)
        mlp = Mlp(self, inner.output, reversal)
        branch_gradient = self.residual(gradient)
        if "mlp_out_norm" in facts.norms:
            branch_gradient = NormedInput(self, "mlp_out_norm", mlp.output(), inputs).reverse(branch_gradient)
        of_mlp = inner.reverse(mlp.reverse(branch_gradient))
        of_input = gradient + of_mlp
        of_attended = gradient if facts.parallel else of_input
        return of_input, *attention.reverse(after.reverse(self.residual(of_attended)))

    def linear(self, target: Target, x: Tensor, reversal: Reversal) -> Tensor:
        """x (E, S, in) -> (E, S, out), as the forward pass has it, and computed again unless that was kept."""
        if target in reversal.b.outputs:
            return reversal.b.outputs[target]
        y = self.frozen(target, x)
        if target not in reversal.b:
            return y
        low = self.low(target, x, reversal)
        return y + torch.bmm(low.view(1, -1, self.shape.rank), reversal.b[target]).view(
            self.shape.rows, -1, y.shape[-1]
        )

    def attention_output(self, mixed: Tensor, reversal: Reversal) -> Tensor:
        """The output of o_proj (E, S, hidden), computed again; `mixed` (E, S, in) if the reverse pass needs neither."""
        if self.reads_attention:
            return self.linear("o_proj", mixed, reversal)
        if "o_proj" in reversal.b:
            self.low("o_proj", mixed, reversal)
        return mixed

    def low(self, target: Target, x: Tensor, reversal: Reversal) -> Tensor:
        """(alpha / r) x A, (E, S, r), which B's gradient needs too."""
        lows = reversal.b.low
        if target not in lows:
            lows[target] = functional.linear(x, getattr(self, f"{target}_a"))
        return lows[target]

    def linear_reverse(self, target: Target, gradient: Tensor, reversal: Reversal) -> Tensor:
        """gradient (E, S, out) of one linear layer's output -> of its input (E, S, in).

        With y = x W^T + l B and l = (alpha / r) x A: dx = dy W + (dy B^T) (alpha / r) A^T, and dB = l^T dy.
        """
        rows, (features, out) = self.shape.rows, self.shape.facts.features(target)
        flat = gradient.view(-1, out)
        if self.grouped:
            input_gradient = self.transposed(target, gradient).view(-1, features)
        else:
            weight = None if reversal.scales else getattr(self.frozen, target)
            input_gradient = self.transposed(target, flat, weight, reversal.scales.get(target))
        if target in reversal.b:
            reversal.gradients[target] = torch.bmm(reversal.b.low[target].permute(0, 2, 1), gradient)
            low = functional.linear(flat, reversal.b[target].view(self.shape.rank, out))  # (E*S, r)
            bias, a = getattr(self, f"{target}_a_bias"), getattr(self, f"{target}_a")
            input_gradient = input_gradient + torch.addmm(bias, low, a)
        return input_gradient.view(rows, -1, features)


class ReversePass(nn.Module):
    """A layer's reverse pass as a module to lower."""

    def __init__(self, layer: ReverseLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See `ReverseLayer.reverse`; one result alone is not in a tuple."""
        results = self.layer.reverse(hidden, *tensors)
        return results if len(results) > 1 else results[0]


class NormedInput:
    """Hidden states as a layer norms them at one place, with what the norm's reverse needs."""

    def __init__(self, layer: ReverseLayer, name: NormPlace, x: Tensor, inputs: LayerInputs) -> None:
        """x: (E, S, hidden). Without a norm of that name, the output is x."""
        self.input = x
        self._norm, self._vectors = layer.norm, inputs.norms.get(name)
        if self._vectors is not None:
            self._results = normed(self._norm, x)

    @cached_property
    def output(self) -> Tensor:
        """The normed states, (E, S, hidden)."""
        return self.input if self._vectors is None else norm_output(self._results, *self._vectors)

    def reverse(self, gradient: Tensor) -> Tensor:
        """gradient of the output -> of the input, both (E, S, hidden)."""
        return (
            gradient if self._vectors is None else norm_reverse(self._norm, gradient, self._vectors[0], self._results)
        )


class HeadStates:
    """Queries or keys of one layer as they are normed and rotated, with what the reverse needs."""

    def __init__(
        self, layer: ReverseLayer, name: str, vectors: Sequence[Tensor], angles: tuple[Tensor, Tensor]
    ) -> None:
        """name: of the norm. vectors: its weight, if there is one. angles: cosines and sines."""
        self._facts, self._vectors, self._angles = layer.shape.facts, vectors, angles
        self._by_width, self._norm_last = self._facts.qk_norm == "width", self._facts.qk_norm_after_rope
        if vectors:
            self._norm: RmsNorm = getattr(layer, name if self._by_width else "head_norm")

    def forward(self, x: Tensor) -> Tensor:
        """x (E, S, heads * head_dim) -> (E, S, heads, head_dim)."""
        split = (x.shape[0], -1, x.shape[2] // self._facts.head_dim, self._facts.head_dim)
        if self._by_width:
            return self._rotated(self._normed(x).view(split))
        x = x.view(split)
        return self._normed(self._rotated(x)) if self._norm_last else self._rotated(self._normed(x))

    def reverse_last(self, gradient: Tensor) -> Tensor:
        """gradient (E, S, heads, head_dim) of the output -> of what the last step of `forward` takes."""
        return self._normed_back(gradient) if self._norm_last else self._rotated_back(gradient)

    def reverse_first(self, gradient: Tensor) -> Tensor:
        """gradient (E, S, heads, head_dim) after the first step of `forward` -> of x, as of either shape of x."""
        if self._by_width:
            gradient = gradient.view(gradient.shape[0], -1, gradient.shape[2] * gradient.shape[3])
        return self._rotated_back(gradient) if self._norm_last else self._normed_back(gradient)

    def _normed(self, x: Tensor) -> Tensor:
        if not self._vectors:
            return x
        self._results = normed(self._norm, x)
        return norm_output(self._results, *self._vectors)

    def _normed_back(self, gradient: Tensor) -> Tensor:
        if not self._vectors:
            return gradient
        return norm_reverse(self._norm, gradient, self._vectors[0], self._results)

    def _rotated(self, x: Tensor) -> Tensor:
        return x if self._facts.learned_positions else rotate(x, *self._angles)

    def _rotated_back(self, gradient: Tensor) -> Tensor:
        return gradient if self._facts.learned_positions else rotate_back(gradient, *self._angles)


class Attention:
    """Attention of one layer with what its reverse needs."""

    def __init__(
        self,
        layer: ReverseLayer,
        x: Tensor,
        query_input: Tensor,
        reversal: Reversal,
        inputs: LayerInputs,
        kept: Kept | None = None,
    ) -> None:
        """x: the normed input, (E, S, hidden). query_input: the queries', (E, T, hidden) with picks, otherwise x.

        kept: of the forward pass; None: everything is computed again.
        """
        tables, head_norms = inputs.tables, inputs.head_norms
        self.layer, self.reversal, self.tables = layer, reversal, tables
        facts, rows = layer.shape.facts, layer.shape.rows
        self.queries = HeadStates(layer, "q_norm", head_norms[:1], tables.query_angles)
        self.keys = HeadStates(layer, "k_norm", head_norms[1:], (tables.cos, tables.sin))
        q = self.queries.forward(layer.linear("q_proj", query_input, reversal))
        k = None if kept is None else kept.keys
        if k is None:
            k = self.keys.forward(layer.linear("k_proj", x, reversal))
        v = layer.linear("v_proj", x, reversal) if kept is None else kept.values
        k, v = (each.view(rows, -1, facts.kv_heads, facts.head_dim) for each in (k, v))
        self.q, self.k, self.v = self._by_group(q * tables.scale), self._by_head(k), self._by_head(v)
        scores = torch.bmm(self.q, self.k.permute(0, 2, 1))  # (E*KV, G*S, S), or (E*KV, G*T, S)
        if facts.attention_softcap is not None:
            self.bent = torch.tanh(scores * tables.uncap)
            scores = self.bent * tables.cap
        self.weights = torch.softmax(scores + tables.mask, dim=-1)
        self.mixed = torch.bmm(self.weights, self.v)  # (E*KV, G*S, head_dim)
        if kept is not None:
            self.output = kept.mixed
            return
        mixed = self._from_group(self.mixed).view(rows, -1, facts.heads * facts.head_dim)
        self.output = layer.attention_output(mixed, reversal)

    def reverse(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """gradient of the output, (E, S, hidden) -> of `query_input`, and of x by keys and values alone.

        A softmax's rows P with dP have dS = P (dP - sum(dP P)); the row sum is sum(dO O) over a head's features (Dao
        et al., FlashAttention, 2022, Appendix B).
        """
        layer, facts, rows = self.layer, self.layer.shape.facts, self.layer.shape.rows
        gradient = layer.linear_reverse("o_proj", gradient, self.reversal)
        mixed = self._by_group(gradient.view(rows, -1, facts.heads, facts.head_dim))
        weights = torch.bmm(mixed, self.v.permute(0, 2, 1))
        v = torch.bmm(self.weights.permute(0, 2, 1), mixed)
        scores = self.weights * (weights - functional.linear(mixed * self.mixed, layer.sum))
        if facts.attention_softcap is not None:
            scores = scores - scores * self.bent * self.bent
        q = self._from_group(torch.bmm(scores, self.k)) * self.tables.scale
        k = self._from_head(torch.bmm(scores.permute(0, 2, 1), self.q))
        q, k = self.queries.reverse_last(q), self.keys.reverse_last(k)
        q, k = self.queries.reverse_first(q), self.keys.reverse_first(k)
        queries, keys = facts.heads * facts.head_dim, facts.kv_heads * facts.head_dim
        of_keys = layer.linear_reverse("k_proj", k.view(rows, -1, keys), self.reversal)
        of_keys = of_keys + layer.linear_reverse("v_proj", self._from_head(v).view(rows, -1, keys), self.reversal)
        return layer.linear_reverse("q_proj", q.view(rows, -1, queries), self.reversal), of_keys

    def _by_group(self, x: Tensor) -> Tensor:
        """x (E, S, heads, head_dim) by key-value head: (E*KV, G*S, head_dim)."""
        facts, rows = self.layer.shape.facts, self.layer.shape.rows
        kv, dim = facts.kv_heads, facts.head_dim
        x = x.view(rows, -1, kv, facts.heads // kv, dim).permute(0, 2, 3, 1, 4)
        return x.contiguous().view(rows * kv, -1, dim)

    def _from_group(self, x: Tensor) -> Tensor:
        """The reverse of `_by_group`."""
        facts, rows = self.layer.shape.facts, self.layer.shape.rows
        kv, dim = facts.kv_heads, facts.head_dim
        x = x.view(rows, kv, facts.heads // kv, -1, dim).permute(0, 3, 1, 2, 4)
        return x.contiguous().view(rows, -1, facts.heads, dim)

    def _by_head(self, x: Tensor) -> Tensor:
        """x (E, S, kv_heads, head_dim) by key-value head: (E*KV, S, head_dim)."""
        facts, rows = self.layer.shape.facts, self.layer.shape.rows
        return x.permute(0, 2, 1, 3).contiguous().view(rows * facts.kv_heads, -1, facts.head_dim)

    def _from_head(self, x: Tensor) -> Tensor:
        """The reverse of `_by_head`."""
        facts, rows = self.layer.shape.facts, self.layer.shape.rows
        return x.view(rows, facts.kv_heads, -1, facts.head_dim).permute(0, 2, 1, 3).contiguous()


class Mlp:
    """The MLP of one layer with what its reverse needs."""

    def __init__(self, layer: ReverseLayer, x: Tensor, reversal: Reversal) -> None:
        """x: the normed input, (E, S, hidden)."""
        self.layer, self.reversal = layer, reversal
        self.up = layer.linear("up_proj", x, reversal)
        self.gate = layer.linear("gate_proj", x, reversal) if layer.shape.facts.gated else self.up
        self.activated, self.slope = activation(layer.shape.facts.activation, self.gate)
        self.inner = self.activated * self.up if layer.shape.facts.gated else self.activated
        if "down_proj" in reversal.b and "mlp_out_norm" not in layer.shape.facts.norms:
            layer.low("down_proj", self.inner, reversal)

    def output(self) -> Tensor:
        """The MLP's output (E, S, hidden); only a norm after it needs it."""
        return self.layer.linear("down_proj", self.inner, self.reversal)

    def reverse(self, gradient: Tensor) -> Tensor:
        """gradient of the output, (E, S, hidden) -> of x."""
        layer = self.layer
        gradient = layer.linear_reverse("down_proj", gradient, self.reversal)
        if not layer.shape.facts.gated:
            return layer.linear_reverse("up_proj", gradient * self.slope, self.reversal)
        return layer.linear_reverse("up_proj", gradient * self.activated, self.reversal) + layer.linear_reverse(
            "gate_proj", gradient * self.up * self.slope, self.reversal
        )
