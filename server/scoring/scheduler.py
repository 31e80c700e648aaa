"""What waits in the scorer, and which of it makes the next batch: texts of all requests on one base, together.

A turn runs one batch of texts to score, lets new texts to grow in, and lets those that grow have one token more: nobody
waits for another's whole request. Knows no sockets and no tenants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]  # the package ships no types
import structlog

from server.compiler.growing import GrowingText, GrowingTexts, cache_bytes
from server.compiler.lora_rows import ServedAdapter
from server.compiler.serving import ScoredText, ServingBase
from server.scoring.errors import ScorerFull
from server.scoring.frames import Batch, GenerateTask, ScoreTask, ServedAdapterRef, ServedBaseRef
from server.scoring.holdings import Holdings, Key, keys_of, needs
from server.scoring.sampling import Sampler
from shared.errors import MobizoError

Send = Callable[[dict[str, Any]], None]
_log = structlog.get_logger()


@dataclass
class _Scoring:
    """A request to score. left: indices of the texts that are not done, longest first."""

    task: ScoreTask
    left: list[int]
    scores: list[list[float]]


@dataclass
class _Growth:
    """A request to generate. last: its newest token."""

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
class _Garden:
    """What grows on one base."""

    ref: ServedBaseRef
    base: ServingBase
    texts: GrowingTexts
    growths: dict[int, _Growth] = field(default_factory=dict)


class Scheduler:
    """The work of one scorer. Used by one thread."""

    def __init__(self, holdings: Holdings, batch_tokens: int, cache_limit: int, send: Send) -> None:
        """cache_limit: bytes of the keys and values of all texts that grow. send: tells the server something."""
        self._holdings, self._batch_tokens, self._cache_limit, self._send = holdings, batch_tokens, cache_limit, send
        self._scorings: OrderedDict[int, _Scoring] = OrderedDict()
        self._waiting: OrderedDict[int, _Growth] = OrderedDict()  # to grow
        self._gardens: dict[str, _Garden] = {}
        self._process = psutil.Process()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._scorings or self._waiting or self._gardens)

    def hear(self, message: dict[str, Any]) -> None:
        """Takes a task, or a cancellation."""
        if message["kind"] == "cancel":
            self._forget(message["id"])
        elif message["kind"] == "score":
            task = ScoreTask.model_validate(message)
            longest_first = sorted(range(len(task.texts)), key=lambda index: -len(task.texts[index].tokens))
            self._scorings[task.id] = _Scoring(task, longest_first, [[]] * len(task.texts))
        else:
            grown = GenerateTask.model_validate(message)
            sampler = Sampler(grown.text.temperature, grown.text.top_p, grown.text.seed)
            self._waiting[grown.id] = _Growth(grown, sampler)

    def turn(self) -> None:
        """One round of batches."""
        if self._scorings:
            self._score()
        if self._waiting:
            self._admit()
        for garden in list(self._gardens.values()):
            self._grow(garden)

    # Scores

    def _score(self) -> None:
        chosen = self._next_batch()
        ref = chosen[0][0].task.base
        base = self._base(ref, [scoring.task.id for scoring, _ in chosen])
        if base is None:
            return
        keys = self._keys_in_use() | {
            key for scoring, index in chosen for ref in _refs(scoring, index) for key in keys_of(ref)
        }
        texts: list[ScoredText] = []
        done: list[tuple[_Scoring, int]] = []
        for scoring, index in chosen:
            text = scoring.task.texts[index]
            try:
                (adapter,) = [self._holdings.adapter(ref, keys) for ref in _refs(scoring, index)] or [None]
            except Exception as error:
                self._fail([scoring.task.id], error)
                continue
            texts.append(ScoredText(text.tokens, text.start, text.answers, adapter))
            done.append((scoring, index))
        # Of a request that just failed nothing more is scored.
        alive = [place for place, (scoring, _) in enumerate(done) if scoring.task.id in self._scorings]
        texts, done = [texts[place] for place in alive], [done[place] for place in alive]
        if not texts:
            return
        began = time.perf_counter()
        try:
            scores = base.score(texts)
        except Exception as error:
            self._fail([scoring.task.id for scoring, _ in done], error)
            return
        self._report("score", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        for (scoring, index), found in zip(done, scores, strict=True):
            scoring.scores[index] = found
            scoring.left.remove(index)
        for number in dict.fromkeys(scoring.task.id for scoring, _ in done):
            scoring = self._scorings[number]
            if scoring.left:
                self._scorings.move_to_end(number)  # the next batch begins with another request
            else:
                del self._scorings[number]
                self._send({"id": number, "scores": scoring.scores})

    def _next_batch(self) -> list[tuple[_Scoring, int]]:
        """Texts of one base that fit one batch, and whose adapters fit the memory; at least one."""
        first = next(iter(self._scorings.values()))
        used = sum(self._held(self._keys_in_use()).values())
        chosen: list[tuple[_Scoring, int]] = []
        longest, sizes = 0, dict[Key, int]()
        for scoring in self._scorings.values():
            if scoring.task.base.sha256 != first.task.base.sha256:
                continue
            for index in scoring.left:
                length = max(longest, len(scoring.task.texts[index].tokens))
                if chosen and length * (len(chosen) + 1) > self._batch_tokens:
                    continue  # a shorter one may fit
                more = sizes | needs(_refs(scoring, index))
                if chosen and used + sum(more.values()) > self._holdings.adapters.limit:
                    continue
                chosen.append((scoring, index))
                longest, sizes = length, more
        return chosen

    # Texts that grow

    def _admit(self) -> None:
        """Lets texts in that fit beside those that grow, first come, first served."""
        first = next(iter(self._waiting.values()))
        ref = first.task.base
        base = self._base(ref, [first.task.id])
        if base is None:
            return
        garden = self._gardens.get(ref.sha256) or _Garden(ref, base, GrowingTexts(base))
        entering: list[_Growth] = []
        for growth in list(self._waiting.values()):
            if growth.task.base.sha256 != ref.sha256 or not self._fits(garden, [*entering, growth]):
                break
            try:
                growth.adapter = self._adapter_of(growth, entering)
            except Exception as error:
                self._fail([growth.task.id], error)
                continue
            entering.append(growth)
        if not entering:
            if not self._gardens and first.task.id in self._waiting:
                self._fail([first.task.id], ScorerFull("the text does not fit MOBIZO_SCORER_CACHE_BYTES; ask for less"))
            return
        for growth in entering:
            del self._waiting[growth.task.id]
            garden.growths[growth.task.id] = growth
        self._gardens[ref.sha256] = garden
        began = time.perf_counter()
        texts = [GrowingText(each.task.id, each.task.text.tokens, each.most, each.adapter) for each in entering]
        try:
            logits = garden.texts.admit(texts)
        except Exception as error:
            self._wither(garden, error)
            return
        self._report("read", [len(text.tokens) for text in texts], [text.adapter for text in texts], began)
        self._say(garden, logits)

    def _fits(self, garden: _Garden, entering: Sequence[_Growth]) -> bool:
        """Whether these may enter: by their prompts' tokens, the cache, and the memory for adapters."""
        lengths = [len(growth.task.text.tokens) for growth in entering]
        if len(entering) > 1 and max(lengths) * len(entering) > self._batch_tokens:
            return False
        total = 0
        for other in {**self._gardens, garden.ref.sha256: garden}.values():
            most = [growth.most for growth in other.growths.values()]
            if other is garden:
                most += [growth.most for growth in entering]
            total += cache_bytes(other.base.facts, most)
        keys = self._keys_in_use()
        used = self._held(keys) | needs([ref for growth in entering for ref in growth.task.adapters])
        lone = not self._gardens and len(entering) == 1  # it is told what does not fit
        return total <= self._cache_limit and (lone or sum(used.values()) <= self._holdings.adapters.limit)

    def _adapter_of(self, growth: _Growth, entering: Sequence[_Growth]) -> ServedAdapter | None:
        if growth.task.text.adapter is None:
            return None
        refs = [ref for each in (*entering, growth) for ref in each.task.adapters]
        keys = self._keys_in_use() | {key for ref in refs for key in keys_of(ref)}
        return self._holdings.adapter(growth.task.adapters[growth.task.text.adapter], keys)

    def _grow(self, garden: _Garden) -> None:
        if not garden.growths:
            self._gardens.pop(garden.ref.sha256, None)
            return
        began = time.perf_counter()
        adapters = [text.adapter for text in garden.texts.texts]
        try:
            logits = garden.texts.follow({number: growth.last for number, growth in garden.growths.items()})
        except Exception as error:
            self._wither(garden, error)
            return
        self._report("grow", [1] * len(adapters), adapters, began)
        self._say(garden, logits)

    def _say(self, garden: _Garden, logits: dict[Any, Any]) -> None:
        """Chooses and tells the next token of each text; those that have ended go."""
        ended = set()
        for number, row in logits.items():
            growth = garden.growths[number]
            growth.last = growth.sampler(row)
            growth.said += 1
            if growth.last in growth.task.text.ends:
                self._send({"id": number, "finish": "stop"})
            else:
                self._send({"id": number, "token": growth.last})
                if growth.said < growth.task.text.most:
                    continue
                self._send({"id": number, "finish": "length"})
            ended.add(number)
        self._remove(garden, ended)

    def _remove(self, garden: _Garden, numbers: set[int]) -> None:
        garden.texts.drop(set(numbers))
        for number in numbers:
            del garden.growths[number]
        if not garden.growths:
            self._gardens.pop(garden.ref.sha256, None)

    def _wither(self, garden: _Garden, error: Exception) -> None:
        """Everything that grows on a base fails."""
        numbers = list(garden.growths)
        garden.growths.clear()
        self._gardens.pop(garden.ref.sha256, None)
        self._fail(numbers, error)

    # Both

    def _base(self, ref: ServedBaseRef, asking: Sequence[int]) -> ServingBase | None:
        """The base; None if it cannot be had, which those who ask are told."""
        try:
            return self._holdings.base(ref, {ref.sha256, *self._gardens})
        except Exception as error:
            self._fail(asking, error)
            return None

    def _keys_in_use(self) -> set[Key]:
        growths = [growth for garden in self._gardens.values() for growth in garden.growths.values()]
        return {key for growth in growths for ref in growth.task.adapters for key in keys_of(ref)}

    def _held(self, keys: set[Key]) -> dict[Key, int]:
        growths = [growth for garden in self._gardens.values() for growth in garden.growths.values()]
        sizes = needs([ref for growth in growths for ref in growth.task.adapters])
        return {key: size for key, size in sizes.items() if key in keys}

    def _fail(self, numbers: Sequence[int], error: Exception) -> None:
        """Ends requests with a problem; what is unexpected is logged, and told without its internals."""
        if not isinstance(error, MobizoError):
            _log.error("scorer-failed", exc_info=error)
        problem = (error if isinstance(error, MobizoError) else MobizoError()).problem()
        for number in dict.fromkeys(numbers):
            self._scorings.pop(number, None)
            self._waiting.pop(number, None)
            self._send({"id": number, "problem": problem})

    def _forget(self, number: int) -> None:
        self._scorings.pop(number, None)
        self._waiting.pop(number, None)
        for garden in list(self._gardens.values()):
            if number in garden.growths:
                self._remove(garden, {number})

    def _report(self, work: Any, lengths: Sequence[int], adapters: Sequence[object], began: float) -> None:
        seconds = time.perf_counter() - began
        bases, held = self._holdings.bases, self._holdings.adapters
        batch = Batch(
            work=work,
            rows=len(lengths),
            tokens=len(lengths) * max(lengths),
            adapters=len({id(adapter) for adapter in adapters if adapter is not None}),
            seconds=seconds,
            held_adapters=sum(key[0] == "b" for key in held.held()),
            held_adapter_bytes=held.nbytes,
            held_bases=len(bases),
            held_base_bytes=bases.nbytes,
            evicted_adapters=held.evicted,
            evicted_bases=bases.evicted,
            waiting_texts=sum(len(scoring.left) for scoring in self._scorings.values()) + len(self._waiting),
            growing_texts=sum(len(garden.growths) for garden in self._gardens.values()),
            rss_bytes=self._process.memory_info().rss,
        )
        self._send(batch.model_dump())


def _refs(scoring: _Scoring, index: int) -> list[ServedAdapterRef]:
    """The adapter of a text, if it has one."""
    adapter = scoring.task.texts[index].adapter
    return [] if adapter is None else [scoring.task.adapters[adapter]]
