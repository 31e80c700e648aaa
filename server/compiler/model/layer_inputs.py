"""The named inputs of a decoder layer besides hidden states. A lowered layer takes them as a list of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts, NormPlace

ABSENT = torch.empty(0)  # stands for an input that a method or a layer does not take
Norms = Mapping[NormPlace, tuple[Tensor, ...]]  # weight, and bias where the base has one, of norms over hidden states


def named_norms(facts: BaseFacts, names: Sequence[NormPlace], vectors: Sequence[Tensor]) -> Norms:
    """Returns the vectors of the norms `names` by name. vectors: as `BaseFacts.vectors_of` lists them, or more."""
    size = len(facts.vectors_of(names[:1]))
    return {name: tuple(vectors[at * size : (at + 1) * size]) for at, name in enumerate(names)}


@dataclass(frozen=True)
class AttentionTables:
    """The inputs of attention besides queries, keys and values. G: query heads of one key-value head; K: keys."""

    mask: Tensor = ABSENT  # (1, G*S, K), added to the scores
    scale: Tensor = ABSENT  # [1], of the queries
    cos: Tensor = ABSENT  # (S, 1, head_dim / 2), where positions are rotary
    sin: Tensor = ABSENT
    cap: Tensor = ABSENT  # [1], where scores are capped
    uncap: Tensor = ABSENT  # [1]: its inverse
    query_cos: Tensor = ABSENT  # (R, T, 1, head_dim / 2), of queries at picked positions; their mask is (R*KV, G*T, K)
    query_sin: Tensor = ABSENT
    # Of a convolution, instead of all others: of each tap, ones where a position meets the one that the tap reads,
    # (R, S, S), or (R, T, S) at picked positions; and its weights (hidden,).
    shifts: tuple[Tensor, ...] = ()
    taps: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, facts: BaseFacts, tensors: Sequence[Tensor], *, masked: bool = True, picked: bool = False
    ) -> AttentionTables:
        """Returns the tables of a base from the list that its layers take.

        masked: whether it begins with the mask. picked: whether it ends with the angles of queries at picked positions.
        """
        rotary = not facts.learned_positions
        names = ["mask"] if masked else []
        names += ["scale", *(["cos", "sin"] if rotary else [])]
        names += ["cap", "uncap"] if facts.attention_softcap is not None else []
        names += ["query_cos", "query_sin"] if rotary and picked else []
        return cls(**dict(zip(names, tensors, strict=True)))

    @property
    def query_angles(self) -> tuple[Tensor, Tensor]:
        """The angles of the queries, cosines and sines; those of the keys if both have the same positions."""
        return (self.cos, self.sin) if self.query_cos is ABSENT else (self.query_cos, self.query_sin)


@dataclass(frozen=True)
class LayerInputs:
    """The inputs of a decoder layer besides hidden states."""

    slab: Tensor  # (n, slab): the layer's B of every path; ABSENT in a layer without adapters
    norms: Norms
    head_norms: tuple[Tensor, ...]  # of queries and keys
    tables: AttentionTables

    @classmethod
    def of(cls, facts: BaseFacts, tensors: Sequence[Tensor], *, adapted: bool, picked: bool) -> LayerInputs:
        """Returns the inputs of a layer from the list that it takes: B, norms, head norms, tables.

        picked: whether its queries are at picked positions.
        """
        slab, rest = (tensors[0], tensors[1:]) if adapted else (ABSENT, tensors)
        norm_count, count = len(facts.layer_norms), len(facts.mixer_vectors)
        norms, own = named_norms(facts, facts.norms, rest), tuple(rest[norm_count : norm_count + count])
        if facts.convolves:
            return cls(slab, norms, (), AttentionTables(shifts=tuple(rest[norm_count + count :]), taps=own))
        return cls(slab, norms, own, AttentionTables.of(facts, rest[norm_count + count :], picked=picked))
