"""The inference program: maps the tokens of one sequence to logits, with a key-value cache and the adapter's B.

It uses the same weights file as training. A decoder layer consists of two delegates with the cache update between them:
one computes queries, keys and values of the new tokens, the other what follows attention. Attention itself is an
operator that reads the filled part of the cache, so that neither time nor memory depends on the cache's capacity. Bases
with sliding windows or capped scores, which it does not have, attend within the second delegate over the whole cache;
their masks use absolute positions, so cache entries after the end of the text have no effect. A convolution takes
attention's place between the delegates. The cache holds its inputs of all tokens, because a session returns to the end
of the prompt for each candidate.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.export.emission import Signature
from server.compiler.export.lowering import Example, Lower
from server.compiler.export.network import BaseNetwork, QuantizedBase, lower_by_shape
from server.compiler.methods.attention_operator import attention_call
from server.compiler.methods.step_inputs import zero_tokens
from server.compiler.methods.training import Adapter, Load, Method
from server.compiler.model.backbone import Backbone
from server.compiler.model.decoder import MASKED, DecoderLayer, LayerShape, LayerTables, layer_shapes
from server.compiler.model.layer_inputs import AttentionTables, Norms, named_norms
from shared.recipe import Recipe, Target
from shared.zo.calibration import Calibration

CACHE_BYTES = 1 << 29  # of a full key-value cache, at most: memory that the native runner takes as a text fills it
WHOLE_CACHE = 512  # tokens, where every new token costs time for all of the cache's
HEADS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj")


def inference_context(recipe: Recipe, facts: BaseFacts) -> int:
    """Returns C, the capacity of the cache in tokens: the base's context length, within the cost of the cache.

    At least the recipe's S. A cache that is read whole for each token has at most WHOLE_CACHE tokens.
    """
    token_bytes = 4 * facts.cached_features
    most = min(CACHE_BYTES // token_bytes if attends_by_operator(facts) else WHOLE_CACHE, facts.context_length)
    # A longer text would be rotated by other factors from its first token on, which the cache already holds.
    changes = [kind.rope.original_context for kind in facts.attention if kind.rope and kind.rope.long_factors]
    return max(recipe.sequence_length, min([most, *changes]))


def attends_by_operator(facts: BaseFacts) -> bool:
    """Returns whether the operator has all that the base's attention does."""
    return facts.attention_softcap is None and not facts.windowed


class CacheTables(LayerTables):
    """The constants of layers that attend over a cache, indexed by absolute position."""

    def __init__(self, facts: BaseFacts, context: int, kind: int = 0) -> None:
        """context: C. kind: index of the kind of attention."""
        super().__init__(facts, context, kind, masked=False)  # computing the rows that are needed is cheap
        self.register_buffer("columns", torch.arange(context), persistent=False)

    def at_places(self, places: Tensor) -> tuple[Tensor, ...]:
        """Returns the tables, without the mask, for tokens at `places` (L,), in a layer's input order."""
        rotary = tuple(table.index_select(0, places) for table in (self.cos, self.sin)) if self.rotary else ()
        caps = (self.cap, self.uncap) if self.capped else ()
        return self.scale, *rotary, *caps

    def masked(self, places: Tensor) -> Tensor:
        """Returns the causal mask (1, G*L, C) for tokens at `places` (L,)."""
        row_places = places.unsqueeze(1)
        hidden = self.columns > row_places  # (L, C)
        if self.window is not None:
            hidden = torch.logical_or(hidden, self.columns <= row_places - self.window)
        return (hidden.to(torch.float32) * MASKED).repeat(self.groups, 1).unsqueeze(0)


class Cache(nn.Module):
    """Every layer's keys and values, (C, kv_heads * head_dim) each, or the inputs of its convolution, (C, hidden)."""

    def __init__(self, facts: BaseFacts, context: int) -> None:
        """context: C."""
        super().__init__()
        self.context = context
        for index, kind in enumerate(facts.of_layers()):
            for name in ("inputs",) if kind.convolves else ("keys", "values"):
                # Not zeros: the program has no initial values, and memory that is not written is not taken.
                self.register_buffer(f"{name}_{index}", torch.empty(context, kind.kv_heads * kind.head_dim))

    def convolution(self, index: int, places: Tensor, inputs: Tensor, taps: Sequence[Tensor]) -> Tensor:
        """Stores the inputs (L, hidden) of L tokens at `places` (L,). Returns their convolution, (L, hidden).

        taps: weights (hidden,), the newest token's last.
        """
        cached, total = self._put(f"inputs_{index}", places, inputs), inputs * taps[-1]
        for back, tap in enumerate(reversed(taps[:-1]), 1):
            earlier = cached.index_select(0, torch.clamp(places - back, min=0))
            exists = (places >= back).to(torch.float32).unsqueeze(1)
            total = total + earlier * exists * tap
        return total

    def write(self, index: int, places: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's keys and values of L tokens at `places` (L,). Returns all keys and values of the layer."""
        return self._put(f"keys_{index}", places, keys), self._put(f"values_{index}", places, values)

    def clear(self) -> None:
        """Sets the cache to zero: uninitialized memory may contain NaN, which a mask does not remove."""
        zeros = {shape: torch.zeros(shape) for shape in dict.fromkeys(buffer.shape for buffer in self.buffers())}
        places = torch.arange(self.context)
        for name, buffer in self.named_buffers():
            self._put(name, places, zeros[buffer.shape])

    def _put(self, name: str, places: Tensor, rows: Tensor) -> Tensor:
        # The exporter performs only an index_put by rows in place; any other write copies the whole cache twice.
        cache: Tensor = getattr(self, name)
        return cache.index_put_((places,), rows)


class HeadsLayer(DecoderLayer):
    """A decoder layer up to its attention: computes the queries, keys and values of the new tokens."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """hidden (1, L, hidden) -> queries, keys and values side by side, (1, L, (heads + 2 kv_heads) head_dim).

        others: B of this part's targets (1, slab) if any, the vectors of the input norm, the head norms, and the
        tables; a convolution takes neither head norms nor tables.
        """
        facts = self.shape.facts
        b, others = self.split_b(others)
        norms, count = named_norms(facts, facts.attention_norms, others), len(vectors_of(facts, 0))
        head_norms = others[count : count + len(facts.head_norms)]
        of_tables = others[count + len(facts.head_norms) :]
        tables = AttentionTables() if facts.convolves else AttentionTables.of(facts, of_tables, masked=False)
        parts = self.heads(self.norm_at("input_norm", hidden, norms), b, head_norms, tables)
        return torch.cat([part.view(1, -1, part.shape[2] * part.shape[3]) for part in parts], dim=-1)

    def split_b(self, others: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """Returns the B of this part's targets, and the other inputs."""
        return (self._factors(others[0]), others[1:]) if self.shape.targets else ({}, others)


class TailLayer(HeadsLayer):
    """A decoder layer after its attention: the output of the heads, and the MLP."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """hidden (1, L, hidden) -> (1, L, hidden).

        others: attention's output (1, L, heads * head_dim), B of this part's targets if any, and the vectors of the
        other norms.
        """
        b, vectors = self.split_b(others[1:])
        return self.finish(hidden, self._linear("o_proj", others[0], b), b, self.norms(vectors))

    def norms(self, vectors: tuple[Tensor, ...]) -> Norms:
        """Returns the vectors of each norm that `finish` reads."""
        return named_norms(self.shape.facts, self.shape.facts.finishing_norms, vectors)


class MixLayer(TailLayer):
    """The rest of a decoder layer with attention over the whole cache."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """hidden (1, L, hidden) -> (1, L, hidden).

        others: the output of HeadsLayer, the cache's keys and values (C, kv_heads * head_dim), the mask (1, G*L, C),
        B of this part's targets if any, the vectors of the other norms, and the tables.
        """
        facts = self.shape.facts
        heads, keys, values, mask = others[:4]
        b, others = self.split_b(others[4:])
        norm_count = len(vectors_of(facts, 1))
        q = heads[..., : facts.heads * facts.head_dim].view(1, -1, facts.heads, facts.head_dim)
        k, v = (cached.view(1, -1, facts.kv_heads, facts.head_dim) for cached in (keys, values))
        tables = replace(AttentionTables.of(facts, others[norm_count:], masked=False), mask=mask)
        return self.finish(
            hidden, self._linear("o_proj", self.mix(q, k, v, tables), b), b, self.norms(others[:norm_count])
        )


def vectors_of(facts: BaseFacts, part: int) -> tuple[str, ...]:
    """Returns the names of the norm vectors that a layer's HeadsLayer (0) or the rest of it (1) takes."""
    return facts.vectors_of(facts.finishing_norms if part else facts.attention_norms)


class Extend(Method):
    """Processes new tokens: stores their keys and values in the cache and returns logits."""

    def __init__(
        self,
        recipe: Recipe,
        size: int,
        backbone: Backbone,
        head: nn.Module | None,
        shapes: Sequence[LayerShape],
        heads: Sequence[nn.Module],
        mixes: Sequence[nn.Module],
        context: int,
    ) -> None:
        """head: see `Network`. shapes, heads, mixes: one per layer. context: C."""
        super().__init__(recipe, size)
        self.backbone, self.head, self.shapes = backbone, head, shapes
        self.heads, self.mixes = nn.ModuleList(heads), nn.ModuleList(mixes)
        self.cache = Cache(backbone.facts, context)
        self.context, self.operator = context, attends_by_operator(backbone.facts)
        kinds = range(len(backbone.facts.attention))
        self.tables = nn.ModuleList(CacheTables(backbone.facts, context, kind) for kind in kinds)
        # One longer than the bound, because the exporter removes a slice of the whole tensor.
        self.register_buffer("at", torch.arange(recipe.sequence_length + 1), persistent=False)

    def forward(self, tokens: Tensor, start: Tensor, picks: Tensor) -> Tensor:
        """tokens (1, L) at positions from `start` [1] on, picks (P,) among these L. Returns logits (P, V)."""
        facts = self.backbone.facts
        places = self.at[: tokens.shape[1]] + start
        first = cast(int, start.item()) if self.operator else 0
        if self.operator:
            torch._check(first >= 0)
            torch._check(first + tokens.shape[1] <= self.context)
        hidden = self.backbone.embed(tokens, places)
        tables_of = [tables.at_places(places) for tables in self.tables]
        masks = [] if self.operator else [tables.masked(places) for tables in self.tables]
        b = self.state.current().unsqueeze(0)  # (1, D)
        at = 0
        for index, (shape, head, mix) in enumerate(zip(self.shapes, self.heads, self.mixes, strict=True)):
            kind = facts.kind(index)
            vectors, count = self.backbone.vectors(index), len(facts.layer_norms)
            own, tables = ((), ()) if shape.facts.convolves else (vectors[count:], tables_of[kind])
            by_name = dict(zip(facts.layer_norms, vectors, strict=False))
            before, after = ([by_name[name] for name in vectors_of(facts, part)] for part in range(2))
            slabs: list[tuple[Tensor, ...]] = []
            for part in parts_of(shape):
                slabs.append((b[:, at : at + part.slab],) if part.targets else ())
                at += part.slab
            projected = head(hidden, *slabs[0], *before, *own, *tables)
            rows, queries = projected.squeeze(0), shape.facts.features("q_proj")[1]
            ends = [queries, queries + shape.facts.features("k_proj")[1]]
            if shape.facts.convolves:
                inputs = rows[:, ends[0] : ends[1]] * rows[:, ends[1] :]
                convolved = self.cache.convolution(index, places, inputs, vectors[count:])
                hidden = mix(hidden, (rows[:, :queries] * convolved).unsqueeze(0), *slabs[1], *after)
                continue
            cached = self.cache.write(index, places, rows[:, ends[0] : ends[1]], rows[:, ends[1] :])
            if self.operator:
                hidden = mix(hidden, self.attend(projected, cached, first), *slabs[1], *after)
            else:
                hidden = mix(hidden, projected, *cached, masks[kind], *slabs[1], *after, *tables)
        answers = self.backbone.gather_positions(hidden, picks.unsqueeze(0))
        logits = self.backbone.cap(self.backbone.logits(answers) if self.head is None else self.head(answers))
        return logits.squeeze(0)

    def attend(self, projected: Tensor, cached: tuple[Tensor, Tensor], first: int) -> Tensor:
        """Returns attention's output (1, L, heads * head_dim) for tokens at positions from `first` on.

        projected: the output of HeadsLayer. cached: the layer's keys and values (C, kv_heads * head_dim).
        """
        facts = self.backbone.facts
        width = facts.heads * facts.head_dim
        q = projected[..., :width].view(1, -1, facts.heads, facts.head_dim)
        k, v = (part.view(1, self.context, facts.kv_heads, facts.head_dim) for part in cached)
        return attention_call(q, k, v, first).view(1, -1, width)


class LoadFresh(Load):
    """Replaces B and clears the cache, which may have been computed with another B."""

    def __init__(self, recipe: Recipe, size: int, cache: Cache) -> None:
        super().__init__(recipe, size)
        self.cache = cache

    def forward(self, b: Tensor) -> Tensor:
        """See `Load`."""
        self.cache.clear()
        return super().forward(b)


def parts_of(shape: LayerShape) -> tuple[LayerShape, LayerShape]:
    """Returns the shapes of a layer's HeadsLayer and MixLayer."""
    return (
        replace(shape, targets=tuple(target for target in shape.targets if target in HEADS)),
        replace(shape, targets=tuple(target for target in shape.targets if target not in HEADS)),
    )


class InferenceNetwork(BaseNetwork):
    """A recipe's network for one sequence and one path. B is one flat vector, regardless of the estimator."""

    def __init__(
        self, recipe: Recipe, base: QuantizedBase, lower: Lower, calibration: Calibration | None = None
    ) -> None:
        """See `BaseNetwork`."""
        super().__init__(recipe.model_copy(update={"estimator": "replay"}), base, lower, calibration=calibration)
        self.context = inference_context(recipe, base.facts)

    def methods(self) -> dict[str, Signature]:
        """Returns every method of the inference file with its example inputs, as listed in `shared.program`."""
        recipe, size, s, t = self.recipe, self.size, self.recipe.sequence_length, self.recipe.answer_length
        shapes = layer_shapes(recipe, self.facts, rows=1, paths=1)
        rest = TailLayer if attends_by_operator(self.facts) else MixLayer
        heads, mixes = self._parts(HeadsLayer, 0, shapes), self._parts(rest, 1, shapes)
        extend = Extend(recipe, size, self.backbone, self.head(1, t), shapes, heads, mixes, self.context)
        example = (zero_tokens(1, s), zero_tokens(1), zero_tokens(t))
        varying = {0: {1: Dim("L", min=1, max=s)}} | ({2: {0: Dim("P", min=1, max=t)}} if t > 1 else {})
        # The operator reads nothing that the text did not write, and what is not cleared takes no memory.
        load = Load(recipe, size) if extend.operator else LoadFresh(recipe, size, extend.cache)
        return {
            "extend": Signature(extend, example, varying),
            "adapter": Signature(Adapter(recipe, size), ()),
            "load": Signature(load, (torch.zeros(size),)),
        }

    def _parts(self, kind: type[DecoderLayer], at: int, shapes: Sequence[LayerShape]) -> list[nn.Module]:
        """Returns one part of every layer, lowered."""
        part_shapes = [parts_of(shape)[at] for shape in shapes]
        weights = [
            {name: tensor for name, tensor in layer.items() if name.startswith(HEADS) == (at == 0)}
            for layer in self._base.layers
        ]
        layers = [kind(*arguments) for arguments in zip(part_shapes, weights, self._scaled_a, strict=True)]
        return lower_by_shape(self._lower, layers, part_shapes, lambda shape: self._example(shape, at))

    def _example(self, shape: LayerShape, at: int) -> Example:
        """Returns the export inputs of a part."""
        facts, length = shape.facts, self.recipe.sequence_length
        tables = CacheTables(facts, self.context)
        places = torch.arange(length)
        slab = (torch.zeros(1, shape.slab),) if shape.targets else ()
        vectors = [torch.ones(facts.hidden) for _ in vectors_of(facts, at)]
        hidden = torch.zeros(1, length, facts.hidden)
        if at == 0:
            heads = [torch.ones(facts.head_norm_size(name)) for name in facts.head_norms]
            return (hidden, *slab, *vectors, *heads, *(() if facts.convolves else tables.at_places(places)))
        width = facts.kv_heads * facts.head_dim
        if attends_by_operator(facts):
            return (hidden, torch.zeros(1, length, facts.heads * facts.head_dim), *slab, *vectors)
        projected = torch.zeros(1, length, facts.heads * facts.head_dim + 2 * width)
        cached = [torch.zeros(self.context, width) for _ in range(2)]
        return (hidden, projected, *cached, tables.masked(places), *slab, *vectors, *tables.at_places(places))
