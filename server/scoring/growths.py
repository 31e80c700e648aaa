"""Texts that are generated: they wait for room, then grow together, a token each in a turn, one batch for each base.

Knows no sockets and no tenants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.compiler.growing import GrowingText, GrowingTexts, cache_bytes
from server.compiler.lora_rows import ServedAdapter
from server.compiler.serving import ServingBase
from server.scoring.errors import ScorerFull
from server.scoring.frames import GenerateTask, ServedBaseRef
from server.scoring.holdings import needs
from server.scoring.sampling import Sampler
from server.scoring.workroom import NotNow, Workroom


@dataclass
class _Growth:
    """A request. said: tokens so far, the newest of which is `last`."""

    task: GenerateTask
    sampler: Sampler
    adapter: ServedAdapter | None = None
    said: int = 0
    last: int = 0

    @property
    def most(self) -> int:
        """Tokens that its text may have in the end."""
        return len(self.task.text.tokens) + self.task.text.most


@dataclass
class _Bed:
    """What grows on one base."""

    ref: ServedBaseRef
    base: ServingBase
    texts: GrowingTexts
    growths: dict[int, _Growth] = field(default_factory=dict)


class Growths:
    """Requests to generate. Used by one thread."""

    def __init__(self, room: Workroom, batch_tokens: int, cache_limit: int) -> None:
        """batch_tokens: of prompts read together, padding included. cache_limit: bytes of all keys and values."""
        self._room, self._batch_tokens, self._cache_limit = room, batch_tokens, cache_limit
        self._waiting: OrderedDict[int, _Growth] = OrderedDict()
        self._beds: dict[str, _Bed] = {}  # by base; each has something that grows

    @property
    def waiting(self) -> int:
        """Texts that are not begun."""
        return len(self._waiting)

    @property
    def growing(self) -> int:
        """Texts that are."""
        return sum(len(bed.growths) for bed in self._beds.values())

    def add(self, task: GenerateTask) -> None:
        """One more request."""
        sampler = Sampler(task.text.temperature, task.text.top_p, task.text.seed)
        self._waiting[task.id] = _Growth(task, sampler)

    def forget(self, number: int) -> None:
        """Nobody waits for a request any more."""
        self._waiting.pop(number, None)
        for bed in list(self._beds.values()):
            if number in bed.growths:
                self._remove(bed, {number})

    def turn(self, *, admit: bool) -> None:
        """Lets texts in that have room, if any may come, and those that were there have one more token."""
        growing = list(self._beds.values())
        if admit and self._waiting:
            self._admit()
        for bed in growing:
            if bed.growths:
                self._grow(bed)

    def _admit(self) -> None:
        """Reads the prompts of texts that fit beside those that grow, first come, first served."""
        first = next(iter(self._waiting.values()))
        ref = first.task.base
        try:
            base = self._room.base(ref)
        except NotNow:
            return
        except Exception as error:
            self._fail(first, error)
            return
        bed = self._beds.get(ref.sha256) or _Bed(ref, base, GrowingTexts(base))
        entering: list[_Growth] = []
        for growth in list(self._waiting.values()):
            if growth.task.base.sha256 != ref.sha256 or not self._fits(bed, [*entering, growth]):
                break
            try:
                growth.adapter = self._adapter(growth)
            except NotNow:
                break
            except Exception as error:
                self._fail(growth, error)
                continue
            del self._waiting[growth.task.id]
            self._room.pin(growth.task.id, ref, growth.task.adapters)
            entering.append(growth)
        if not entering:
            if not self._beds and first.task.id in self._waiting:
                self._fail(first, ScorerFull("the text does not fit MOBIZO_SCORER_CACHE_BYTES; ask for less"))
            return
        bed.growths |= {growth.task.id: growth for growth in entering}
        self._beds[ref.sha256] = bed
        texts = [GrowingText(each.task.id, each.task.text.tokens, each.most, each.adapter) for each in entering]
        began = time.perf_counter()
        try:
            logits = bed.texts.admit(texts)
        except Exception as error:
            self._wither(bed, error)
            return
        self._room.report("read", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        self._say(bed, logits)

    def _fits(self, bed: _Bed, entering: Sequence[_Growth]) -> bool:
        """Whether the last of these may enter with the others: by prompts, cache, and memory for adapters."""
        lengths = [len(growth.task.text.tokens) for growth in entering]
        if len(entering) > 1 and max(lengths) * len(entering) > self._batch_tokens:
            return False
        most = {
            other.ref.sha256: (other, [growth.most for growth in other.growths.values()])
            for other in self._beds.values()
        }
        _, own = most.setdefault(bed.ref.sha256, (bed, []))
        own += [growth.most for growth in entering]
        if sum(cache_bytes(other.base.facts, sizes) for other, sizes in most.values()) > self._cache_limit:
            return False
        lone = not self._beds and len(entering) == 1  # it is told what does not fit
        return lone or self._room.fits(needs(entering[-1].task.adapters))

    def _adapter(self, growth: _Growth) -> ServedAdapter | None:
        number = growth.task.text.adapter
        return None if number is None else self._room.adapter(growth.task.adapters[number])

    def _grow(self, bed: _Bed) -> None:
        adapters = [text.adapter for text in bed.texts.texts]
        began = time.perf_counter()
        try:
            logits = bed.texts.follow({number: growth.last for number, growth in bed.growths.items()})
        except Exception as error:
            self._wither(bed, error)
            return
        self._room.report("grow", [1] * len(adapters), adapters, began)
        self._say(bed, logits)

    def _say(self, bed: _Bed, logits: Mapping[Hashable, Any]) -> None:
        """Chooses and tells the next token of each text; those that have ended go."""
        ended = set()
        for number, growth in bed.growths.items():
            if number not in logits:
                continue
            growth.last = growth.sampler(logits[number])
            growth.said += 1
            if growth.last in growth.task.text.ends:
                self._room.tell({"id": number, "finish": "stop"})
            else:
                self._room.tell({"id": number, "token": growth.last})
                if growth.said < growth.task.text.most:
                    continue
                self._room.tell({"id": number, "finish": "length"})
            ended.add(number)
        self._remove(bed, ended)

    def _remove(self, bed: _Bed, numbers: set[int]) -> None:
        bed.texts.drop(numbers)
        for number in numbers:
            del bed.growths[number]
            self._room.unpin(number)
        if not bed.growths:
            self._beds.pop(bed.ref.sha256, None)

    def _fail(self, growth: _Growth, error: Exception) -> None:
        """A text that waits fails."""
        del self._waiting[growth.task.id]
        self._room.fail(growth.task.id, error)

    def _wither(self, bed: _Bed, error: Exception) -> None:
        """Everything that grows on a base fails."""
        self._beds.pop(bed.ref.sha256, None)
        for number in bed.growths:
            self._room.unpin(number)
            self._room.fail(number, error)
        bed.growths.clear()
