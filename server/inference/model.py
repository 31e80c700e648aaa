"""A base model in memory, in float32, that scores and continues texts of many adapters in one batch.

The decoder is the one that programs are compiled from. Only the adapted part of a linear layer differs: each row has
its own adapter (`server.inference.lora_rows`). Rows are padded on the right, so that the causal mask hides the padding.
"""

# mypy: disallow-subclassing-any=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

import numpy as np
import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts, locate_base
from server.compiler.checkpoints.checkpoint import Checkpoint, load_checkpoint
from server.compiler.model.backbone import Backbone, BackboneTensors
from server.compiler.model.convolution import ConvolutionTables, convolution
from server.compiler.model.decoder import MASKED, DecoderLayer, LayerShape, all_tables, rotary_angles
from server.compiler.model.layer_inputs import AttentionTables
from server.inference.lora_rows import AdaptedRows, ServedAdapter
from server.inference.texts import Text
from shared.constrained_decoding import Constraint, NoTokenAllowed
from shared.errors import MobizoError, Untrusted
from shared.generated_text import GeneratedToken
from shared.recipe import Target
from shared.sampling import Sampler, generated_token
from shared.zo.lora import F32

MAX_POSITIONS = 256  # positions whose logits over the whole vocabulary are in memory at the same time
# Of one layer: keys (R, kv_heads, head_dim, C) and values (R, kv_heads, C, head_dim); of a convolution, inputs
# (R, C, hidden).
Cache = tuple[Tensor, ...]


class ServingLayer(DecoderLayer):
    """A decoder layer for any number of rows, each with its own adapter in `rows`.

    cache: where keys and values of the rows are written, if anywhere. places: positions (R,) of the rows' only tokens,
    which attend over the cache; None: the rows are whole texts.
    """

    def __init__(self, facts: BaseFacts, index: int, weights: Mapping[str, Tensor]) -> None:
        super().__init__(LayerShape(facts.of_layer(index), "fp32", paths=1, rows=1, rank=1, targets=()), weights, {})
        self.index = index
        self.rows = AdaptedRows([])
        self.cache: Cache | None = None
        self.places: Tensor | None = None

    def _linear(self, target: Target, x: Tensor, b: Mapping[str, Tensor]) -> Tensor:
        y = self.frozen(target, x)
        self.rows.add((self.index, target), x, y)
        return y

    def mix(self, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables) -> Tensor:
        """As `DecoderLayer.mix`, with the cache if there is one."""
        if self.cache is None:
            return super().mix(q, k, v, tables)
        if self.places is not None:
            return self._mix_cached(self.cache, self.places, q, k, v, tables)
        length = k.shape[1]
        if self.shape.facts.convolves:
            self.cache[0][:, :length] = (k * v).squeeze(2)
        else:
            self.cache[0][..., :length] = k.permute(0, 2, 3, 1)
            self.cache[1][:, :, :length] = v.permute(0, 2, 1, 3)
        return super().mix(q, k, v, tables)

    def _mix_cached(
        self, cache: Cache, places: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: AttentionTables
    ) -> Tensor:
        """The same of one token of each row over the cache, (R, 1, heads * head_dim) or (R, 1, hidden)."""
        rows = torch.arange(len(q))
        if self.shape.facts.convolves:
            inputs = cache[0]
            inputs[rows, places] = (k * v)[:, 0, 0]
            return q.squeeze(2) * convolution(inputs[:, : tables.shifts[0].shape[-1]], tables)
        (keys, values), length = cache, tables.mask.shape[-1]
        keys[rows, :, :, places] = k.squeeze(1)
        values[rows, :, places] = v.squeeze(1)
        q = q.reshape(len(q) * k.shape[2], -1, k.shape[3])
        mixed = self.attend(q, keys[..., :length].flatten(0, 1), values[:, :, :length].flatten(0, 1), tables)
        return mixed.reshape(len(rows), 1, -1)


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
        self._layers = [ServingLayer(self.facts, index, layer) for index, layer in enumerate(checkpoint.layers)]

    @classmethod
    def open(cls, source: str, sha256: str) -> ServingBase:
        """The base at `source`. Raises Untrusted if its files have another sha256, and as `load_checkpoint`."""
        if locate_base(source).sha256 != sha256:
            raise Untrusted("the base model's files are not those that were registered; put the right ones back")
        return cls(load_checkpoint(source))

    @property
    def nbytes(self) -> int:
        """Memory of its weights."""
        return 4 * self.facts.parameters

    @torch.inference_mode()
    def score(self, texts: Sequence[Text], adapters: Sequence[ServedAdapter | None]) -> list[list[list[float]]]:
        """Returns the log-probabilities of each text's picks, nats, in one batch. adapters: of each text."""
        hidden = self.read(AdaptedRows(adapters), [text.tokens for text in texts])
        scores: list[list[list[float]]] = [[] for _ in texts]
        places = [(row, position, tokens) for row, text in enumerate(texts) for position, tokens in text.picks]
        for begin in range(0, len(places), MAX_POSITIONS):
            part = places[begin : begin + MAX_POSITIONS]
            logits = self.logits(hidden, [(row, position) for row, position, _ in part])
            totals = torch.logsumexp(logits, dim=-1).tolist()
            for index, (row, _, tokens) in enumerate(part):
                scores[row].append([float(logits[index, token]) - totals[index] for token in tokens])
        return scores

    def logits(self, hidden: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
        """Logits (P, V) at the (row, position)s of hidden (R, S, hidden)."""
        rows, positions = (torch.tensor(part) for part in zip(*places, strict=True))
        hidden_at = hidden[rows, positions].unsqueeze(1)  # (P, 1, hidden)
        answers = self._backbone.gather_positions(hidden_at, torch.zeros(len(places), 1, dtype=torch.int64))
        return self._backbone.cap(self._backbone.logits(answers)).squeeze(1)

    def read(self, rows: AdaptedRows, texts: Sequence[Sequence[int]], caches: Iterable[Cache] | None = None) -> Tensor:
        """Hidden states (R, S, hidden) of texts in the rows' order, padded on the right to the longest.

        caches: of each layer, where keys and values are written.
        """
        length = max(len(tokens) for tokens in texts)
        padded = np.zeros((len(texts), length), np.int64)
        for row, tokens in enumerate(texts):
            padded[row, : len(tokens)] = tokens
        kinds = [tables(length, len(texts)) for tables in all_tables(self.facts, length)]
        return self._forward(rows, self._backbone.embed(torch.from_numpy(padded)), kinds, caches, None)

    def step(self, rows: AdaptedRows, tokens: Tensor, places: Tensor, caches: Iterable[Cache]) -> Tensor:
        """Hidden states (R, 1, hidden) of one token (R,) of each row at its place (R,), written into the caches."""
        hidden = self._backbone.embed(tokens.unsqueeze(1), places.unsqueeze(1))
        kinds = [_step_tables(self.facts, places, kind) for kind in range(len(self.facts.attention))]
        if self.facts.conv_layers:
            length = int(places.max()) + 1
            kinds.append(ConvolutionTables(self.facts, length).picked(length, places.unsqueeze(1)))
        return self._forward(rows, hidden, kinds, caches, places)

    def _forward(
        self,
        rows: AdaptedRows,
        hidden: Tensor,
        kinds: Sequence[tuple[Tensor, ...]],
        caches: Iterable[Cache] | None,
        places: Tensor | None,
    ) -> Tensor:
        """hidden (R, S, hidden) through every layer. kinds: tables of each attention kind."""
        for layer, cache in zip(self._layers, repeat(None) if caches is None else caches, strict=False):
            layer.rows, layer.cache, layer.places = rows, cache, places
            layer.shape = replace(layer.shape, rows=len(hidden))
            tables = kinds[self.facts.kind(layer.index)]
            hidden = layer(hidden, *self._backbone.vectors(layer.index), *tables)
            layer.cache = None
        return hidden


def _step_tables(facts: BaseFacts, places: Tensor, kind: int) -> tuple[Tensor, ...]:
    """A layer's tables for one token of each row at `places` (R,), over the cache up to the last place."""
    columns, row_places, window = torch.arange(int(places.max()) + 1), places.unsqueeze(1), facts.attention[kind].window
    hidden = columns > row_places  # (R, length)
    if window is not None:
        hidden |= columns <= row_places - window
    mask = (hidden.to(torch.float32) * MASKED).repeat_interleave(facts.kv_heads, 0).unsqueeze(1)  # (R*KV, 1, length)
    rotary: tuple[Tensor, ...] = ()
    if not facts.learned_positions:
        angles = rotary_angles(facts, facts.attention[kind], places, len(columns))
        rotary = tuple(part.view(len(places), 1, 1, -1) for part in angles)
    caps: tuple[Tensor, ...] = ()
    if facts.attention_softcap is not None:
        cap = torch.full((1,), facts.attention_softcap)
        caps = (cap, 1.0 / cap)
    return (mask, torch.full((1,), facts.attention_scale), *rotary, *caps)


def _new_cache(facts: BaseFacts, rows: int, limit: int) -> Cache:
    """An empty cache of one layer, for `limit` tokens of each row."""
    if facts.convolves:
        return (torch.zeros(rows, limit, facts.hidden),)
    heads, dim = facts.kv_heads, facts.head_dim
    return torch.zeros(rows, heads, dim, limit), torch.zeros(rows, heads, limit, dim)


class TextBatch:
    """Texts that grow together by one token in each step: keys, values and samplers. Rows are numbers of the texts."""

    def __init__(
        self,
        base: ServingBase,
        texts: Sequence[Text],
        adapters: Sequence[ServedAdapter | None],
        constraints: Sequence[Constraint | None],
    ) -> None:
        """adapters, constraints: of each text."""
        self._base, self._texts, self._adapters = base, texts, list(adapters)
        self._rows = list(range(len(texts)))  # texts that are in the batch
        self._samplers = [
            Sampler(text.temperature, text.top_p, text.seed, text.drawn, constraint)
            for text, constraint in zip(texts, constraints, strict=True)
        ]
        self._last = [0] * len(texts)  # the newest token of each text
        self._lengths = torch.zeros(len(texts), dtype=torch.int64)
        limit = max(text.limit for text in texts)
        self._caches = [_new_cache(kind, len(texts), limit) for kind in base.facts.of_layers()]

    @torch.inference_mode()
    def read(self, start: int, stop: int) -> list[GeneratedToken | MobizoError]:
        """Reads the prompts of some texts. Returns the first token after each."""
        rows, prompts = slice(start, stop), [text.tokens for text in self._texts[start:stop]]
        caches = (tuple(tensor[rows] for tensor in cache) for cache in self._caches)
        hidden = self._base.read(AdaptedRows(self._adapters[rows]), prompts, caches)
        self._lengths[rows] = torch.tensor([len(tokens) for tokens in prompts])
        places = [(row, len(tokens) - 1) for row, tokens in enumerate(prompts)]
        return self._sample(range(start, stop), self._base.logits(hidden, places).numpy())

    @torch.inference_mode()
    def step(self, rows: Sequence[int]) -> list[GeneratedToken | MobizoError]:
        """Appends the newest token of these texts, and removes the others. Returns the tokens after them."""
        if len(rows) < len(self._rows):
            kept, self._rows = [self._rows.index(row) for row in rows], list(rows)
            self._adapters, self._lengths = [self._adapters[at] for at in kept], self._lengths[kept]
            for tensor in chain.from_iterable(self._caches):  # in place, because a copy would take the memory twice
                tensor[: len(kept)] = tensor[kept]
            self._caches = [tuple(tensor[: len(kept)] for tensor in cache) for cache in self._caches]
        tokens = torch.tensor([self._last[row] for row in rows])
        hidden = self._base.step(AdaptedRows(self._adapters), tokens, self._lengths, self._caches)
        self._lengths = self._lengths + 1
        return self._sample(rows, self._base.logits(hidden, [(at, 0) for at in range(len(rows))]).numpy())

    def _sample(self, rows: Sequence[int], logits: F32) -> list[GeneratedToken | MobizoError]:
        """Returns the next token of each of these texts, or why it has none. logits (R, V)."""
        tokens: list[GeneratedToken | MobizoError] = []
        for row, row_logits in zip(rows, logits, strict=True):
            if np.isnan(row_logits).any():
                tokens.append(MobizoError("the model's output is not a number; the adapter is probably damaged"))
                continue
            try:
                self._last[row] = self._samplers[row](row_logits)
            except NoTokenAllowed as error:
                tokens.append(error)
                continue
            tokens.append(generated_token(self._last[row], row_logits, self._texts[row].likeliest))
        return tokens
