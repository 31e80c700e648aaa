"""Everything that is frozen around the decoder layers (embeddings, norms, tables, lm_head), and the pass through all
layers.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.model.decoder import LayerShape, all_tables, norm_of
from server.compiler.model.rounding import SCALE


@dataclass(frozen=True)
class BackboneTensors:
    """The frozen tensors that every method's graph reads. Tables are float32, or int8 with one scale for each row."""

    embedding: Tensor  # (V, hidden)
    embedding_scale: Tensor | None  # (V,) of a quantized table
    norms: Tensor  # (K layers + F, hidden): each layer's `layer_norms`, then `final_norms`
    head_norms: Tensor | None  # (`mixer_rows` of each layer, the widest one's size): each layer's `mixer_vectors`
    positions: Tensor | None  # (context, hidden), learned
    lm_head: Tensor | None  # (V, hidden); None when tied to the embedding
    lm_head_scale: Tensor | None

    def by_name(self) -> dict[str, Tensor]:
        """Returns the tensors that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


class Backbone(nn.Module):
    """The frozen tensors of one base, and the forward pass of hidden states through its layers."""

    def __init__(self, facts: BaseFacts, tensors: BackboneTensors, bound: int) -> None:
        """bound: S, the most tokens of a sequence."""
        super().__init__()
        self.facts = facts
        self.tied = tensors.lm_head is None
        for name, tensor in tensors.by_name().items():
            self.register_buffer(name, tensor)
        self.tables = nn.ModuleList(all_tables(facts, bound))
        self.final_norm = norm_of(facts)

    def embed(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Hidden states (E, S, hidden) of tokens (E, S) before the first layer, at `places` (S,); None: 0 to S."""
        hidden = self.rows("embedding", tokens)
        if self.facts.embedding_scale != 1.0:
            hidden = hidden * self.facts.embedding_scale
        if self.facts.learned_positions:
            learned = self.positions[: tokens.shape[1]] if places is None else self.rows("positions", places)
            hidden = hidden + learned
        return hidden

    def rows(self, table: str, indices: Tensor) -> Tensor:
        """Rows (..., hidden) of an embedding or lm_head table, float32."""
        values, scales = getattr(self, table), getattr(self, table + SCALE, None)
        rows = functional.embedding(indices, values)
        return rows if scales is None else rows.to(torch.float32) * functional.embedding(indices, scales)

    def head_table(self) -> tuple[Tensor, Tensor | None]:
        """lm_head's table (V, hidden), the embedding's when tied, and its scales (V, 1) if it is quantized."""
        name = "embedding" if self.tied else "lm_head"
        return getattr(self, name), getattr(self, name + SCALE, None)

    def head_rows(self, indices: Tensor) -> Tensor:
        """Rows of lm_head, (..., hidden); the embedding's when tied, so that the table is stored once."""
        return self.rows("embedding" if self.tied else "lm_head", indices)

    def vectors(self, index: int) -> tuple[Tensor, ...]:
        """The vectors that layer `index` takes: of its norms, then of its mixer."""
        count, rows = len(self.facts.layer_norms), self.facts.mixer_rows
        vectors = [self.norms[count * index + at] for at in range(count)]
        for at, size in enumerate(self.facts.of_layer(index).mixer_vectors.values()):
            vector = self.head_norms[rows * index + at]
            vectors.append(leading(vector, size))
        return tuple(vectors)

    def forward_layers(
        self,
        layers: Sequence[nn.Module],
        shapes: Sequence[LayerShape],
        first: int,
        hidden: Tensor,
        b: Tensor | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """hidden (R, S, hidden) through layers `first`, `first` + 1, ... of the base; b: every path's B (n, D).

        positions: (R, T), of a last layer with picks, whose states (R, T, hidden) are the result.
        """
        all_others = self.others(shapes, first, hidden.shape[1], b, positions)
        for layer, shape, others in zip(layers, shapes, all_others, strict=True):
            output = layer(*states_for(shape, hidden, positions), *others)
            hidden = output if isinstance(output, Tensor) else output[0]  # others follow that this pass does not need
        return hidden

    def others(
        self,
        shapes: Sequence[LayerShape],
        first: int,
        length: int,
        b: Tensor | None,
        positions: Tensor | None = None,
    ) -> Iterator[tuple[Tensor, ...]]:
        """Yields the inputs of layers `first`, `first` + 1, ... besides hidden states of `length`; b: (n, D).

        positions: as `forward_layers`.
        """
        tables = [of_kind(length, shapes[0].rows) for of_kind in self.tables]
        at = 0
        for index, shape in enumerate(shapes, first):
            slab: tuple[Tensor, ...] = ()
            if b is not None and shape.targets:
                slab = (b[:, at : at + shape.slab],)
                at += shape.slab
            kind = self.facts.kind(index)
            own = self.tables[kind].picked(length, positions) if shape.picks else tables[kind]
            yield *slab, *self.vectors(index), *own

    def gather_positions(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Normed hidden states at `positions` (R, T) alone, before lm_head: (R, T, hidden) of (R, S, hidden)."""
        return self.final_norm(picked_states(hidden, positions), *self.final_vectors())

    def final_vectors(self) -> tuple[Tensor, ...]:
        """The vectors of the norm before lm_head."""
        count = len(self.facts.layer_norms) * self.facts.layers
        return tuple(self.norms[count + at] for at in range(len(self.facts.final_norms)))

    def cap(self, logits: Tensor) -> Tensor:
        """Logits as the base caps them, if it does."""
        cap = self.facts.final_softcap
        return logits if cap is None else torch.tanh(logits * (1 / cap)) * cap

    def logits(self, answers: Tensor) -> Tensor:
        """lm_head over the whole vocabulary on the float32 table: answers (..., hidden) -> (..., V)."""
        return functional.linear(answers, self.head_table()[0])


def leading(vector: Tensor, size: int) -> Tensor:
    """The first `size` elements of a row of a table, whose rows are as long as the widest one."""
    return vector if size == len(vector) else vector[:size]


def picked_states(hidden: Tensor, positions: Tensor) -> Tensor:
    """Hidden states at `positions` (R, T): (R, T, hidden) of (R, S, hidden)."""
    return torch.gather(hidden, 1, positions.to(torch.int64).unsqueeze(2).expand(-1, -1, hidden.shape[2]))


def states_for(shape: LayerShape, hidden: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
    """The hidden states that a layer takes: (R, S, hidden), and those at `positions` (R, T) if it has picks."""
    if not shape.picks or positions is None:
        return (hidden,)
    return hidden, picked_states(hidden, positions)
