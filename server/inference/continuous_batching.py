"""Continuous batching on one base model: texts with different adapters advance together, one token in each step.

Texts join and leave between two steps. The key-value cache is then rebuilt in the order of their adapters; it is as
long as the longest text may become.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.checkpoints.base import BaseFacts
from server.compiler.model.decoder import MASKED, inverse_frequencies
from server.inference.lora_rows import AdaptedRows, ServedAdapter
from server.inference.model import LayerCache, ServingBase
from shared.zo.lora import F32

FLOAT_BYTES = 4


@dataclass
class BatchedText:
    """One text of a batch. name: its key for the caller. most: its maximum length. length: its current length."""

    name: Hashable
    tokens: Sequence[int]
    most: int
    adapter: ServedAdapter | None
    length: int = 0


def cache_bytes(facts: BaseFacts, texts: Sequence[int]) -> int:
    """Returns the bytes of keys and values for texts of these maximum lengths, tokens."""
    width = 2 * facts.kv_heads * facts.head_dim * FLOAT_BYTES
    return len(texts) * max(texts, default=0) * facts.layers * width


class ContinuousBatch:
    """The running texts of one base model. Not thread-safe."""

    def __init__(self, base: ServingBase) -> None:
        self._base = base
        self.texts: list[BatchedText] = []
        self._rows = AdaptedRows([])
        self._caches: list[LayerCache] = []

    def admit(self, texts: Sequence[BatchedText]) -> dict[Hashable, F32]:
        """Reads the prompts of new texts. Returns the logits (V,) after each, by name."""
        with torch.inference_mode():
            return self._admit(texts)

    def _admit(self, texts: Sequence[BatchedText]) -> dict[Hashable, F32]:
        rows = AdaptedRows([text.adapter for text in texts])
        ordered = [texts[row] for row in rows.order]
        hidden = self._base.read(rows, [text.tokens for text in ordered], keep=True)
        for text in ordered:
            text.length = len(text.tokens)
        logits = self._base.logits(hidden, [(row, text.length - 1) for row, text in enumerate(ordered)])
        keys_values = [layer.keys_values for layer in self._base.layers]
        self._lay_out([*self.texts, *ordered], [pair for pair in keys_values if pair is not None])
        for layer in self._base.layers:
            layer.keys_values = None
        return {text.name: row.numpy() for text, row in zip(ordered, logits, strict=True)}

    def follow(self, tokens: Mapping[Hashable, int]) -> dict[Hashable, F32]:
        """Appends one token to each text. Returns the logits (V,) after it, by name."""
        with torch.inference_mode():
            return self._follow(tokens)

    def _follow(self, tokens: Mapping[Hashable, int]) -> dict[Hashable, F32]:
        places = torch.tensor([text.length for text in self.texts])
        next_tokens = torch.tensor([tokens[text.name] for text in self.texts])
        length = int(places.max()) + 1
        kinds = [step_tables(self._base.facts, places, length, sliding) for sliding in self._base.attention_kinds]
        hidden = self._base.follow(self._rows, next_tokens, places, kinds, self._caches)
        for text in self.texts:
            text.length += 1
        logits = self._base.logits(hidden, [(row, 0) for row in range(len(self.texts))])
        return {text.name: row.numpy() for text, row in zip(self.texts, logits, strict=True)}

    def drop(self, names: Collection[Hashable]) -> None:
        """Removes texts."""
        if any(text.name in names for text in self.texts):
            with torch.inference_mode():
                self._lay_out(self.texts, [], names)

    def _lay_out(
        self,
        texts: Sequence[BatchedText],
        new_keys_values: Sequence[tuple[Tensor, Tensor]],
        without: Collection[Hashable] = (),
    ) -> None:
        """Rebuilds the cache with `texts` in the order of their adapters, new texts after those already running.

        new_keys_values: keys and values of the new texts for each layer, (N, S, kv_heads, head_dim).
        """
        facts, old_count = self._base.facts, len(self.texts)
        numbers = [number for number, text in enumerate(texts) if text.name not in without]
        rows = AdaptedRows([texts[number].adapter for number in numbers])
        order = [numbers[row] for row in rows.order]
        most = max((texts[number].most for number in order), default=0)
        old = [(row, number) for row, number in enumerate(order) if number < old_count]
        new = [(row, number - old_count) for row, number in enumerate(order) if number >= old_count]
        caches = []
        for index in range(facts.layers if order else 0):
            keys = torch.zeros(len(order), facts.kv_heads, facts.head_dim, most)
            values = torch.zeros(len(order), facts.kv_heads, most, facts.head_dim)
            for row, number in old:
                length = texts[number].length
                keys[row, ..., :length] = self._caches[index].keys[number, ..., :length]
                values[row, :, :length] = self._caches[index].values[number, :, :length]
            for row, number in new:
                length = texts[old_count + number].length
                k, v = (part[number, :length] for part in new_keys_values[index])  # (S, kv_heads, head_dim)
                keys[row, ..., :length] = k.permute(1, 2, 0)
                values[row, :, :length] = v.permute(1, 0, 2)
            caches.append(LayerCache(keys, values))
        self.texts, self._rows, self._caches = [texts[number] for number in order], rows, caches


def step_tables(facts: BaseFacts, places: Tensor, length: int, sliding: bool) -> tuple[Tensor, ...]:
    """A layer's tables for one token of each row at `places` (R,), over the first `length` places of the cache."""
    columns, row_places = torch.arange(length), places.unsqueeze(1)
    hidden = columns > row_places  # (R, length)
    if sliding and facts.window is not None:
        hidden |= columns <= row_places - facts.window
    mask = (hidden.to(torch.float32) * MASKED).repeat_interleave(facts.kv_heads, 0).unsqueeze(1)  # (R*KV, 1, length)
    rope = (facts.sliding_rope or facts.rope) if sliding else facts.rope
    rotary: tuple[Tensor, ...] = ()
    if rope is not None:
        angles = torch.outer(places.to(torch.float32), inverse_frequencies(rope, facts.head_dim))
        rotary = tuple(part.view(len(places), 1, 1, -1) for part in (angles.cos(), angles.sin()))
    caps: tuple[Tensor, ...] = ()
    if facts.attention_softcap is not None:
        cap = torch.full((1,), facts.attention_softcap)
        caps = (cap, 1.0 / cap)
    return (mask, torch.full((1,), facts.attention_scale), *rotary, *caps)
