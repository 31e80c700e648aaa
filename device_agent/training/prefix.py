"""Caches the outputs of a program's frozen lower layers for each text, in memory, for steps and for evaluations.

Hidden states of records are user data in another form, so they are not written to disk. Every epoch visits each example
once, so the first cached states stay and none is evicted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from device_agent.executors import F32, Arrays
from device_agent.executors.program import TrainingProgram
from device_agent.memory import spare_bytes
from shared.program import ProgramManifest
from shared.program_inputs import TOKEN_DTYPE
from shared.zo.encoding import Tokens

MAX_BYTES = 256 << 20
Positions = NDArray[np.int64]  # of tokens
STRIDE = 16  # tokens: a text's state is computed at its own length rounded up to a multiple


class UpcomingTexts:
    """Texts in the order in which their states will be requested. They fill rows of a call that would be empty."""

    def __init__(self, texts: Iterable[Tokens] = ()) -> None:
        """texts: read as far as they are needed."""
        self._remaining = iter(texts)
        self._waiting: dict[int, deque[Tokens]] = {}  # by the length at which their states are computed

    def of_length(self, length: int, cache: PrefixCache) -> Iterator[Tokens]:
        """Yields the next texts whose states are computed at `length`."""
        waiting = self._waiting.setdefault(length, deque())
        while True:
            while waiting:
                yield waiting.popleft()
            text = next(self._remaining, None)
            if text is None:
                return
            self._waiting.setdefault(cache.computed_length(text), deque()).append(text)


class PrefixCache:
    """Hidden states before the first adapted layer, by text; texts that do not fit are computed at every visit.

    A text's state is computed at a length that depends on this text only, because kernels may sum longer rows in
    another order and the run must not depend on batch composition.
    """

    def __init__(
        self, program: TrainingProgram, width: int, rows: int, bound: int, *, dynamic: bool, budget: int | None = None
    ) -> None:
        """width: the base's hidden size. rows: E. bound: the recipe's S. dynamic: the manifest's `dynamic_length`.

        budget: cache size in bytes; default: MAX_BYTES or a quarter of the available memory.
        """
        self._program, self._width, self._rows, self._bound, self._dynamic = program, width, rows, bound, dynamic
        self._budget = budget
        self._cache: dict[Tokens, F32] = {}
        self._bytes = 0

    def hidden(
        self,
        texts: Sequence[Tokens],
        shape: tuple[int, int],
        upcoming: UpcomingTexts | None = None,
        reserved: int = 0,
        kept: Sequence[Positions] | None = None,
    ) -> F32:
        """Returns hidden states (rows, S, hidden) for a suffix, zero at padding and in rows without a text.

        texts: of the first rows. shape: (rows, S). reserved: bytes of the cache that stay free for other texts.
        kept: the positions of each text whose states are returned, one after the other; None: all.
        """
        states = {text: self._cache[text] for text in texts if text in self._cache}
        missing: dict[int, list[Tokens]] = {}
        for text in dict.fromkeys(texts):
            if text not in states:
                missing.setdefault(self.computed_length(text), []).append(text)
        for length, group in missing.items():
            for at in range(0, len(group), self._rows):
                batch_texts = group[at : at + self._rows]
                free_bytes = self._free_bytes(reserved)
                extra_texts = self._extra_texts(batch_texts, length, upcoming or UpcomingTexts(), free_bytes)
                states |= self._compute([*batch_texts, *extra_texts], length, free_bytes)
        hidden = np.zeros((*shape, self._width), np.float32)
        for row, text in enumerate(texts):
            own = states[text] if kept is None else states[text][kept[row]]
            hidden[row, : len(own)] = own
        return hidden

    def computed_length(self, text: Tokens) -> int:
        """Returns the length at which the text's state is computed."""
        own = -(-len(text) // STRIDE) * STRIDE
        return min(own, self._bound) if self._dynamic else self._bound

    def state_bytes(self, tokens: int) -> int:
        """Returns the size of the states of so many tokens, in bytes."""
        return tokens * self._width * np.dtype(np.float32).itemsize

    def states(self, texts: Sequence[Tokens]) -> F32 | None:
        """Returns the cached states of texts, one after the other, float32 (N, hidden); None if one is not cached."""
        found = [self._cache[text] for text in texts if text in self._cache]
        return np.concatenate(found) if 0 < len(found) == len(texts) else None

    def add(self, texts: Sequence[Tokens], states: F32, reserved: int) -> None:
        """Caches states that `states` returned for the same texts; others are ignored. reserved: see `hidden`."""
        ends = np.cumsum([len(text) for text in texts])
        if states.size == ends[-1] * self._width:
            pieces = np.split(states.reshape(-1, self._width), ends[:-1])
            self._store(dict(zip(texts, pieces, strict=True)), self._free_bytes(reserved))

    def _store(self, states: Mapping[Tokens, F32], free_bytes: int) -> None:
        """Caches the states that fit `free_bytes`."""
        for text, state in states.items():
            if text not in self._cache and state.nbytes <= free_bytes:
                free_bytes -= state.nbytes
                self._bytes += state.nbytes
                self._cache[text] = state

    def _free_bytes(self, reserved: int) -> int:
        """Returns the bytes that may still be cached."""
        if self._budget is None:
            # Not before the program has taken its own memory.
            self._budget = min(MAX_BYTES, spare_bytes() // 4)
        return self._budget - reserved - self._bytes

    def _extra_texts(
        self, batch_texts: Sequence[Tokens], length: int, upcoming: UpcomingTexts, free_bytes: int
    ) -> list[Tokens]:
        """Returns upcoming texts for the rows that `batch_texts` leaves free, as many as can be cached."""
        extra_texts: list[Tokens] = []
        free, free_bytes = self._rows - len(batch_texts), free_bytes - self.state_bytes(sum(map(len, batch_texts)))
        if free == 0 or free_bytes <= 0:
            return extra_texts
        for text in upcoming.of_length(length, self):
            if text in self._cache or text in batch_texts or text in extra_texts:
                continue
            free_bytes -= self.state_bytes(len(text))
            if free_bytes < 0:
                break
            extra_texts.append(text)
            if len(extra_texts) == free:
                break
        return extra_texts

    def _compute(self, texts: Sequence[Tokens], length: int, free_bytes: int) -> dict[Tokens, F32]:
        """Returns the states of at most E texts, and caches those that fit `free_bytes`."""
        packed = np.zeros((self._rows, length), TOKEN_DTYPE)
        for row, text in enumerate(texts):
            packed[row, : len(text)] = text
        fresh = self._program.prefix(packed)
        states = {text: fresh[row, : len(text)].copy() for row, text in enumerate(texts)}
        self._store(states, free_bytes)
        return states


def split_prefix(
    cache: PrefixCache | None,
    texts: Sequence[Tokens],
    batch: Arrays,
    upcoming: UpcomingTexts,
    reserved: int = 0,
    kept: Sequence[Positions] | None = None,
) -> tuple[F32 | None, Arrays]:
    """Returns the hidden states of a packed batch and its other inputs; None and the batch without a cache.

    texts, upcoming, reserved, kept: as of `PrefixCache.hidden`.
    """
    if cache is None:
        return None, batch
    tokens, *others = batch
    rows, length = tokens.shape
    return cache.hidden(texts, (rows, length), upcoming, reserved, kept), tuple(others)


def prefix_cache(program: TrainingProgram, manifest: ProgramManifest, *, dynamic: bool) -> PrefixCache | None:
    """Returns an empty cache for an open program; None if the program's steps run all layers.

    dynamic: whether a text's state is computed at about its own length; otherwise at the recipe's S.
    """
    if "suffix" not in manifest.methods:
        return None
    recipe = manifest.recipe
    return PrefixCache(program, manifest.shape.hidden, recipe.effective_batch, recipe.sequence_length, dynamic=dynamic)
