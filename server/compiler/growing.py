"""Texts of one base that grow together, each by its own adapter, a token at a time, over a cache of keys and values.

Texts come and go between two tokens; the cache is then laid out anew, in the order of their adapters. It is as long as
the longest text may become. Knows no sampling and no text.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.compiler.base import BaseFacts
from server.compiler.decoder import MASKED, inverse_frequencies
from server.compiler.lora_rows import AdaptedRows, ServedAdapter
from server.compiler.serving import LayerCache, ServingBase
from shared.lora import F32

FLOAT_BYTES = 4


@dataclass
class GrowingText:
    """One text. name: whose it is, outside. most: tokens that it may have in the end. length: it has by now."""

    name: Hashable
    tokens: Sequence[int]
    most: int
    adapter: ServedAdapter | None
    length: int = 0


def cache_bytes(facts: BaseFacts, texts: Sequence[int]) -> int:
    """Memory of the keys and values of texts that may become so long, tokens."""
    width = 2 * facts.kv_heads * facts.head_dim * FLOAT_BYTES
    return len(texts) * max(texts, default=0) * facts.layers * width


class GrowingTexts:
    """The texts that grow on one base. Used by one thread."""

    def __init__(self, base: ServingBase) -> None:
        self._base = base
        self.texts: list[GrowingText] = []
        self._rows = AdaptedRows([])
        self._caches: list[LayerCache] = []

    def admit(self, texts: Sequence[GrowingText]) -> dict[Hashable, F32]:
        """Reads new texts. Returns the logits (V,) after each, by name."""
        with torch.inference_mode():
            return self._admit(texts)

    def _admit(self, texts: Sequence[GrowingText]) -> dict[Hashable, F32]:
        rows = AdaptedRows([text.adapter for text in texts])
        ordered = [texts[row] for row in rows.order]
        hidden = self._base.read(rows, [text.tokens for text in ordered], keep=True)
        for text in ordered:
            text.length = len(text.tokens)
        logits = self._base.logits(hidden, [(row, text.length - 1) for row, text in enumerate(ordered)])
        made = [layer.made for layer in self._base.layers]
        self._lay_out([*self.texts, *ordered], [pair for pair in made if pair is not None])
        for layer in self._base.layers:
            layer.made = None
        return {text.name: row.numpy() for text, row in zip(ordered, logits, strict=True)}

    def follow(self, tokens: Mapping[Hashable, int]) -> dict[Hashable, F32]:
        """Each text goes on with one token. Returns the logits (V,) after it, by name."""
        with torch.inference_mode():
            return self._follow(tokens)

    def _follow(self, tokens: Mapping[Hashable, int]) -> dict[Hashable, F32]:
        places = torch.tensor([text.length for text in self.texts])
        given = torch.tensor([tokens[text.name] for text in self.texts])
        seen = int(places.max()) + 1
        kinds = [step_tables(self._base.facts, places, seen, sliding) for sliding in self._base.attention_kinds]
        hidden = self._base.follow(self._rows, given, places, kinds, self._caches)
        for text in self.texts:
            text.length += 1
        logits = self._base.logits(hidden, [(row, 0) for row in range(len(self.texts))])
        return {text.name: row.numpy() for text, row in zip(self.texts, logits, strict=True)}

    def drop(self, names: Collection[Hashable]) -> None:
        """Forgets texts."""
        if any(text.name in names for text in self.texts):
            with torch.inference_mode():
                self._lay_out(self.texts, [], names)

    def _lay_out(
        self,
        texts: Sequence[GrowingText],
        made: Sequence[tuple[Tensor, Tensor]],
        without: Collection[Hashable] = (),
    ) -> None:
        """Puts `texts` in the order of their adapters; those after the ones held by now come with keys and values.

        made: of each layer, (N, S, kv_heads, head_dim) of the new texts.
        """
        facts, held = self._base.facts, len(self.texts)
        kept = [number for number, text in enumerate(texts) if text.name not in without]
        rows = AdaptedRows([texts[number].adapter for number in kept])
        order = [kept[row] for row in rows.order]
        most = max((texts[number].most for number in order), default=0)
        old = [(row, number) for row, number in enumerate(order) if number < held]
        new = [(row, number - held) for row, number in enumerate(order) if number >= held]
        caches = []
        for index in range(facts.layers if order else 0):
            keys = torch.zeros(len(order), facts.kv_heads, facts.head_dim, most)
            values = torch.zeros(len(order), facts.kv_heads, most, facts.head_dim)
            for row, number in old:
                length = texts[number].length
                keys[row, ..., :length] = self._caches[index].keys[number, ..., :length]
                values[row, :, :length] = self._caches[index].values[number, :, :length]
            for row, number in new:
                length = texts[held + number].length
                k, v = (part[number, :length] for part in made[index])  # (S, kv_heads, head_dim)
                keys[row, ..., :length] = k.permute(1, 2, 0)
                values[row, :, :length] = v.permute(1, 0, 2)
            caches.append(LayerCache(keys, values))
        self.texts, self._rows, self._caches = [texts[number] for number in order], rows, caches


def step_tables(facts: BaseFacts, places: Tensor, seen: int, sliding: bool) -> tuple[Tensor, ...]:
    """A layer's tables for one token of each row at `places` (R,), over the first `seen` places of the cache."""
    columns, own = torch.arange(seen), places.unsqueeze(1)
    hidden = columns > own  # (R, seen)
    if sliding and facts.window is not None:
        hidden |= columns <= own - facts.window
    mask = (hidden.to(torch.float32) * MASKED).repeat_interleave(facts.kv_heads, 0).unsqueeze(1)  # (R*KV, 1, seen)
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
