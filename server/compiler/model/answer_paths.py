"""Layers of steps that perturb B at the answer's positions alone (`Recipe.perturbed`).

The current B runs each sequence once, and its keys and values are kept. Every path then runs only the positions that
predict answer tokens, over those keys and values and its own.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.model.convolution import ConvolutionTables, convolution
from server.compiler.model.decoder import MASKED, DecoderLayer, LayerTables
from server.compiler.model.layer_inputs import AttentionTables, named_norms


class KeyedLayer(DecoderLayer):
    """A decoder layer that also returns its keys and values."""

    def forward(self, hidden: Tensor, *others: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden (E, S, hidden) -> the next hidden states, keys and values, both (E, S, kv_heads * head_dim).

        others: those of `LayerInputs`.
        """
        inputs, b = self.inputs(others)
        q, k, v = self.heads(self.norm_at("input_norm", hidden, inputs.norms), b, inputs.head_norms, inputs.tables)
        mixed = self._linear("o_proj", self.mix(q, k, v, inputs.tables), b)
        following = self.finish(hidden, mixed, b, inputs.norms)
        width = self.shape.facts.kv_heads * self.shape.facts.head_dim
        return following, k.view(self.shape.rows, -1, width), v.view(self.shape.rows, -1, width)


@dataclass(frozen=True)
class AnswerTables:
    """The inputs of all answer layers of one kind of attention. n paths, E examples, T answer positions, G groups."""

    shared_mask: Tensor  # (E, 1, T*G, S), added to the scores of the keys that all paths share
    own_mask: Tensor  # (E, 1, T*G, T), added to the scores of a path's own keys
    others: tuple[Tensor, ...]  # as `AttentionTables` takes them, without its mask; angles are (n*E, T, 1, head_dim/2)

    @classmethod
    def of(
        cls,
        facts: BaseFacts,
        tables: LayerTables,
        positions: Tensor,
        mask: Tensor,
        at: Tensor,
        paths: int,
    ) -> AnswerTables:
        """positions, mask: (E, T), of answer tokens and their weights. at: 0 to S - 1, of the same type as positions.

        A path sees its own keys at the answer's positions and the
        shared ones at all others. Padding, whose weight is 0, is not an answer position; no other position attends
        to it.
        """
        examples, picks = positions.shape
        row, column, key = positions.unsqueeze(2), positions.unsqueeze(1), at.reshape(1, 1, -1)
        replaced = _replaced(row, mask, key)
        hidden = torch.logical_or(key > row, replaced)  # (E, T, S)
        own_hidden = torch.logical_or(column > row, mask.unsqueeze(1) == 0)  # (E, T, T)
        if tables.window is not None:
            hidden = torch.logical_or(hidden, key <= row - tables.window)
            own_hidden = torch.logical_or(own_hidden, column <= row - tables.window)
        own_hidden = torch.logical_and(own_hidden, torch.eye(picks).unsqueeze(0) == 0)
        groups = facts.heads // facts.kv_heads
        shared_mask, own_mask = (
            (each.to(torch.float32) * MASKED).unsqueeze(2).repeat(1, 1, groups, 1).view(examples, 1, groups * picks, -1)
            for each in (hidden, own_hidden)
        )
        angles: tuple[Tensor, ...] = ()
        if tables.rotary:
            places = positions.reshape(-1).to(torch.int64)
            angles = tuple(
                table.index_select(0, places).view(examples, picks, 1, -1).repeat(paths, 1, 1, 1)
                for table in (tables.cos, tables.sin)
            )
        caps = (tables.cap, tables.uncap) if tables.capped else ()
        return cls(shared_mask, own_mask, (tables.scale, *angles, *caps))

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """The tables in the order in which a layer takes them."""
        return self.shared_mask, self.own_mask, *self.others


def _replaced(row: Tensor, mask: Tensor, key: Tensor) -> Tensor:
    """Returns which positions key (1, 1, S) are answer positions row (E, T, 1) of weight mask (E, T): (E, 1, S)."""
    return torch.logical_and(row == key, mask.unsqueeze(2) != 0).to(torch.float32).sum(1, keepdim=True) != 0


def answer_tables(
    facts: BaseFacts,
    tables: LayerTables | ConvolutionTables,
    positions: Tensor,
    mask: Tensor,
    at: Tensor,
    paths: int,
) -> tuple[Tensor, ...]:
    """Returns the tables of answer layers of one kind, in the order in which they take them; see `AnswerTables.of`.

    Of a convolution: of each tap, which position meets which shared input, (E, T, S), and which of a path's own,
    (n*E, T, T).
    """
    if isinstance(tables, LayerTables):
        return AnswerTables.of(facts, tables, positions, mask, at, paths).flat
    row, key = positions.unsqueeze(2), at.reshape(1, 1, -1)
    kept = 1.0 - _replaced(row, mask, key).to(torch.float32)
    answered = (mask.unsqueeze(1) != 0).to(torch.float32)  # (E, 1, T)
    shared = (table * kept for table in tables.between(row, key))
    own = ((table * answered).repeat(paths, 1, 1) for table in tables.between(row, positions.unsqueeze(1)))
    return *shared, *own


class AnswerLayer(DecoderLayer):
    """A decoder layer at the answer's positions of every path."""

    def forward(self, hidden: Tensor, *others: Tensor) -> Tensor:
        """hidden (R, T, hidden) -> (R, T, hidden), path-major: R = n E.

        others: the shared keys and values (E, S, kv_heads * head_dim), the first two of `answer_tables`, the slab if
        the layer is adapted, the vectors of norms and mixer, and the rest of the tables.
        """
        facts, shape = self.shape.facts, self.shape
        keys, values, shared_mask, own_mask, *rest = others
        b = self._factors(rest.pop(0)) if shape.targets else {}
        norm_count, vector_count = len(facts.layer_norms), len(facts.mixer_vectors)
        norms = named_norms(facts, facts.norms, rest)
        vectors, rest = rest[norm_count : norm_count + vector_count], rest[norm_count + vector_count :]
        if facts.convolves:
            mixed = self._convolved(
                self.norm_at("input_norm", hidden, norms), b, keys * values, (shared_mask, own_mask, *rest), vectors
            )
            return self.finish(hidden, self._linear("o_proj", mixed, b), b, norms)
        tables, head_norms = AttentionTables.of(facts, rest, masked=False), vectors
        q, k, v = self.heads(self.norm_at("input_norm", hidden, norms), b, head_norms, tables)
        paths, kv, dim = shape.paths, facts.kv_heads, facts.head_dim
        examples, groups, picks = shape.rows // paths, facts.heads // kv, hidden.shape[1]
        # (n, E, T, KV, G * dim) -> (E, KV, n, T, G * dim)
        q = q.view(paths, examples, picks, kv, groups * dim).permute(1, 3, 0, 2, 4).contiguous()
        own_keys = k.view(paths, examples, picks, kv, dim).permute(1, 3, 0, 4, 2).contiguous()
        own_values = v.view(paths, examples, picks, kv, dim).permute(1, 3, 0, 2, 4).contiguous()
        keys = keys.view(examples, -1, kv, dim).permute(0, 2, 3, 1).contiguous().view(examples * kv, dim, -1)
        values = values.view(examples, -1, kv, dim).permute(0, 2, 1, 3).contiguous().view(examples * kv, -1, dim)
        # Zeros in place of a path's own: a slice of the weights of all others would write their number down.
        values = torch.cat((values[:, :picks] * 0.0, values), dim=1)
        own_scores = torch.bmm(
            q.view(examples * kv * paths, groups * picks, dim), own_keys.view(examples * kv * paths, dim, picks)
        )
        scores = torch.bmm(q.view(examples * kv, paths * groups * picks, dim), keys)
        if facts.attention_softcap is not None:
            own_scores = torch.tanh(own_scores * tables.uncap) * tables.cap
            scores = torch.tanh(scores * tables.uncap) * tables.cap
        own_scores = own_scores.view(examples, kv * paths, groups * picks, picks) + own_mask
        scores = scores.view(examples, kv * paths, groups * picks, -1) + shared_mask
        weights = torch.softmax(torch.cat((own_scores, scores), dim=-1), dim=-1)
        own_weights = weights[..., :picks].contiguous().view(examples * kv * paths, groups * picks, picks)
        mixed = torch.bmm(own_weights, own_values.view(examples * kv * paths, picks, dim))
        mixed = mixed.view(examples * kv, paths * groups * picks, dim) + torch.bmm(
            weights.view(examples * kv, paths * groups * picks, -1), values
        )
        mixed = mixed.view(examples, kv, paths, picks, groups * dim).permute(2, 0, 3, 1, 4).contiguous()
        mixed = mixed.view(shape.rows, picks, facts.heads * dim)
        return self.finish(hidden, self._linear("o_proj", mixed, b), b, norms)

    def _convolved(
        self, x: Tensor, b: Mapping[str, Tensor], shared: Tensor, tables: Sequence[Tensor], taps: Sequence[Tensor]
    ) -> Tensor:
        """The gated convolution of x at the answer's positions, both (R, T, hidden).

        shared: the convolution's inputs that all paths share, (E, S, hidden). tables: as `answer_tables`.
        """
        shape, count = self.shape, len(taps)
        of_shared, of_own = (
            AttentionTables(shifts=tuple(part), taps=tuple(taps)) for part in (tables[:count], tables[count:])
        )
        gate, *gated = (each.view(*x.shape) for each in self.heads(x, b, (), of_own))
        own = convolution(gated[0] * gated[1], of_own).view(shape.paths, -1, x.shape[2])
        mixed = own + convolution(shared, of_shared).view(1, -1, x.shape[2])
        return gate * mixed.view(*x.shape)
