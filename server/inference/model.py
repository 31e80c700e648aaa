"""A base model in memory, in float32, that scores texts of many adapters in one batch.

The decoder is the one that programs are compiled from. Only the adapted part of a linear layer differs: the batch
decides which rows use which B (`server.inference.lora_rows`). Rows are padded on the right, so that the causal mask
hides the padding.
"""

# mypy: disallow-subclassing-any=False

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts, locate_base
from server.compiler.checkpoints.checkpoint import Checkpoint, load_checkpoint
from server.compiler.model.backbone import Backbone, BackboneTensors
from server.compiler.model.decoder import DecoderLayer, LayerShape, LayerTables
from server.compiler.model.layer_inputs import AttentionTables
from server.inference.lora_rows import AdaptedRows, ServedAdapter
from shared.errors import Untrusted
from shared.recipe import Target

POSITIONS_AT_ONCE = 256  # positions whose logits over the whole vocabulary are held at once


@dataclass(frozen=True)
class ScoredText:
    """Tokens to read, and the answers, whose tokens are predicted from position `start` on."""

    tokens: Sequence[int]
    start: int
    answers: Sequence[Sequence[int]]
    adapter: ServedAdapter | None


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys (R, kv_heads, head_dim, C) and values (R, kv_heads, C, head_dim) of texts that generate."""

    keys: Tensor
    values: Tensor

    def write(self, places: Tensor, k: Tensor, v: Tensor) -> None:
        """Puts k, v (R, kv_heads, head_dim) of one token each at the rows' `places` (R,)."""
        rows = torch.arange(len(places))
        self.keys[rows, :, :, places] = k
        self.values[rows, :, places] = v


def use_threads(count: int | None) -> None:
    """Computes with that many threads in this process; None: one for each core."""
    if count is not None:
        torch.set_num_threads(count)


class ServingLayer(DecoderLayer):
    """A decoder layer for any number of rows; `rows` assigns each row its adapter's B.

    With a cache, the rows are single tokens at `places`, which attend over it. Without one, whole texts, whose keys and
    values (R, S, kv_heads, head_dim) are left in `keys_values` if `keep` says so.
    """

    def __init__(self, facts: BaseFacts, index: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__(LayerShape(facts, "fp32", paths=1, rows=1, rank=1, targets=()), weights, {})
        self.index = index
        self.rows = AdaptedRows([])
        self.keep = False
        self.keys_values: tuple[Tensor, Tensor] | None = None
        self.cache: LayerCache | None = None
        self.places: Tensor | None = None

    def _linear(self, target: Target, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        y = self.frozen(target, x)
        self.rows.add((self.index, target), x, y)
        return y

    def _attention(
        self,
        x: Tensor,
        query_input: Tensor,
        b: Mapping[str, Tensor],
        head_norms: tuple[Tensor, ...],
        tables: AttentionTables,
    ) -> Tensor:
        q, k, v = self.heads(x, b, head_norms, tables, query_input)
        if self.cache is None or self.places is None:
            self.keys_values = (k, v) if self.keep else None
            return self._linear("o_proj", self.mix(q, k, v, tables), b)
        self.cache.write(self.places, k.squeeze(1), v.squeeze(1))
        kv, dim, length = k.shape[2], k.shape[3], tables.mask.shape[-1]
        mixed = self.attend(
            q.reshape(len(q) * kv, -1, dim),
            self.cache.keys[..., :length].flatten(0, 1),
            self.cache.values[:, :, :length].flatten(0, 1),
            tables,
        )
        return self._linear("o_proj", mixed.reshape(len(q), 1, -1), b)


class ServingBase:
    """One base model, ready to serve. Used by one thread."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.facts = checkpoint.facts
        tables: dict[str, Tensor | None] = {"lm_head": None, "positions": None, **checkpoint.tables}
        tensors = BackboneTensors(
            norms=checkpoint.norms,
            head_norms=checkpoint.head_norms,
            embedding_scale=None,
            lm_head_scale=None,
            **tables,
        )
        self._backbone = Backbone(self.facts, tensors, 1)
        self.layers = [ServingLayer(self.facts, index, layer) for index, layer in enumerate(checkpoint.layers)]

    @classmethod
    def open(cls, source: str, sha256: str) -> ServingBase:
        """The base at `source`. Raises Untrusted if its files have another sha256, and as `load_checkpoint`."""
        if locate_base(source).sha256 != sha256:
            raise Untrusted("the base model's files are not those that were registered; put the right ones back")
        return cls(load_checkpoint(source))

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        backbone_bytes = int(sum(tensor.nbytes for tensor in self._backbone.buffers()))
        return backbone_bytes + int(sum(tensor.nbytes for layer in self.layers for tensor in layer.buffers()))

    def score(self, texts: Sequence[ScoredText]) -> list[list[float]]:
        """The log-probability of each answer of each text, nats, in one batch."""
        with torch.inference_mode():
            return self._score(texts)

    def _score(self, texts: Sequence[ScoredText]) -> list[list[float]]:
        rows = AdaptedRows([text.adapter for text in texts])
        ordered = [texts[row] for row in rows.order]
        hidden = self.read(rows, [text.tokens for text in ordered])
        answers_at: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (row, position): (token, answer) to add up
        for row, text in enumerate(ordered):
            for answer, tokens in enumerate(text.answers):
                for position, token in enumerate(tokens, text.start):
                    answers_at.setdefault((row, position), []).append((token, answer))
        log_p = [[0.0] * len(text.answers) for text in ordered]
        places = list(answers_at)
        for begin in range(0, len(places), POSITIONS_AT_ONCE):
            part = places[begin : begin + POSITIONS_AT_ONCE]
            logits = self.logits(hidden, part)
            totals = torch.logsumexp(logits, dim=-1).tolist()
            for index, (row, position) in enumerate(part):
                for token, answer in answers_at[row, position]:
                    log_p[row][answer] += float(logits[index, token]) - totals[index]
        in_request_order: list[list[float]] = [[] for _ in texts]
        for row, scores in zip(rows.order, log_p, strict=True):
            in_request_order[row] = scores
        return in_request_order

    def logits(self, hidden: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Logits (P, V) at the (row, position)s of hidden (R, S, hidden)."""
        rows, positions = (torch.tensor(part) for part in zip(*places, strict=True))
        hidden_at = hidden[rows, positions].unsqueeze(1)  # (P, 1, hidden)
        answers = self._backbone.gather_positions(hidden_at, torch.zeros(len(places), 1, dtype=torch.int64))
        return self._backbone.cap(self._backbone.logits(answers)).squeeze(1)

    def read(self, rows: AdaptedRows, texts: Sequence[Sequence[int]], keep: bool = False) -> Tensor:
        """Hidden states (R, S, hidden) of texts in the rows' order, padded on the right to the longest.

        keep: leave keys and values in the layers' `keys_values`.
        """
        length = max(len(tokens) for tokens in texts)
        padded = np.zeros((len(texts), length), np.int64)
        for row, tokens in enumerate(texts):
            padded[row, : len(tokens)] = tokens
        kinds = [LayerTables(self.facts, length, sliding)(length) for sliding in self.attention_kinds]
        for layer in self.layers:
            layer.keep, layer.cache = keep, None
        return self.forward_layers(rows, self._backbone.embed(torch.from_numpy(padded)), kinds)

    def follow(
        self,
        rows: AdaptedRows,
        tokens: Tensor,
        places: Tensor,
        kinds: Sequence[tuple[Tensor, ...]],
        caches: Iterable[LayerCache],
    ) -> Tensor:
        """Hidden states (R, 1, hidden) of one token (R,) of each row at its place (R,), written into the caches.

        kinds: tables by attention kind, made for those places.
        """
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.keep, layer.cache, layer.places = False, cache, places
        return self.forward_layers(rows, self._backbone.embed(tokens.unsqueeze(1), places.unsqueeze(1)), kinds)

    @property
    def attention_kinds(self) -> tuple[bool, ...]:
        """Whether a kind of layer slides, of each kind that the base has."""
        return (False, True) if self.facts.sliding_layers else (False,)

    def forward_layers(self, rows: AdaptedRows, hidden: Tensor, kinds: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """hidden (R, S, hidden) through every layer."""
        shape = replace(self.layers[0].shape, rows=len(hidden))
        for layer in self.layers:
            layer.rows, layer.shape = rows, shape
            tables = kinds[layer.index in self.facts.sliding_layers]
            hidden = layer(hidden, *self._backbone.vectors(layer.index), *tables)
        return hidden
