"""The scorer of one server: requests that wait together on one base run together, in batches of many adapters.

The batches run in a process of their own, which is started on demand and again after its death. Each turn starts the
waiting requests that fit and runs one batch of each run, so that a long request does not hold up the others. Requests
start in the order of their arrival. If a batch of several requests fails, each of them goes on alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import replace
from itertools import count
from multiprocessing import get_context
from typing import Any

import prometheus_client
import structlog

from server.inference import worker
from server.inference.errors import ScorerBusy, ScorerFull, ScorerLate, ScorerOff, ScorerStopped
from server.inference.texts import ServedAdapterRef, ServedBaseRef, Text
from server.settings import Settings
from server.web.state import AppState
from shared.chat_template import ChatTemplate, Tools
from shared.errors import MobizoError, TooManyRequests
from shared.generated_text import GeneratedToken
from shared.openai.completions import Finish

BATCH_TOKENS = 2048  # of one batch, padding included; a longer text is a batch of its own
QUEUE_TOKENS = 524_288  # of all unanswered requests; one tenant has at most half of them
CALL_SECONDS = 600.0  # of one batch, reading the base model included; a process that takes longer is replaced
ANSWER_SECONDS = 120.0  # that a request waits for its next answer
RETRY_SECONDS, RESTART_SECONDS = 2.0, 1.0
_log = structlog.get_logger()


class Request:
    """Texts of one kind on one base. open: the indices of those that are not finished.

    answers: (index of the text, its log-probabilities or next token, reason of its end); or the error that ends the
    work. alone: it shares no batch, because one with it has failed.
    """

    def __init__(self, base: ServedBaseRef, texts: Sequence[Text]) -> None:
        self.base, self.texts = base, texts
        self.open = set(range(len(texts)))
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.generated: list[list[int]] = [[] for _ in texts]  # tokens of each text
        self.tokens = sum(text.limit for text in texts)
        self.generates = texts[0].max_tokens > 0
        self.alone = False

    @property
    def group(self) -> object:
        """What requests that run together have in common."""
        return self if self.alone else (self.generates, self.base)

    def rest(self, index: int) -> Text:
        """Returns what remains of a text to generate, after the tokens that were answered."""
        text, generated = self.texts[index], self.generated[index]
        tokens = (*text.tokens, *generated)
        return replace(text, tokens=tokens, max_tokens=text.max_tokens - len(generated), drawn=len(generated))

    def add(self, index: int, answer: Any, finish: Finish | None) -> None:
        """Answers with a part of a text. finish: None if the text goes on."""
        self.answers.put_nowait((index, answer, finish))
        if finish is not None:
            self.open.discard(index)

    def add_token(self, index: int, token: GeneratedToken | MobizoError) -> None:
        """Answers with the next token of a text, or with the error that ends it. An end token itself is left out."""
        text, generated = self.texts[index], self.generated[index]
        if index not in self.open:
            return
        if isinstance(token, MobizoError):
            self.fail(token)
            return
        generated.append(token.token)
        if token.token in text.ends:
            self.add(index, None, "stop")
        else:
            self.add(index, token, "length" if len(generated) == text.max_tokens else None)

    def fail(self, error: Exception) -> None:
        """Ends the work on it with an error."""
        self.open.clear()
        self.answers.put_nowait(error)


Place = tuple[Request, int]  # of a text: its request and its index there


class ScorerMeters:
    """Metrics of one server's scorer."""

    def __init__(self, registry: prometheus_client.CollectorRegistry) -> None:
        waiting = "mobizo_scorer_waiting_tokens", "Tokens of unanswered requests"
        self.waiting = prometheus_client.Gauge(*waiting, registry=registry)
        starts = "mobizo_scorer_starts", "Starts of the scorer process"
        self.starts = prometheus_client.Counter(*starts, registry=registry)


class Scorer:
    """One server's scorer. Belongs to one event loop."""

    def __init__(self, settings: Settings, meters: ScorerMeters) -> None:
        self._settings, self._meters = settings, meters
        self._text_bytes = self._adapter_bytes = settings.scorer_memory_bytes // 8
        self._numbers = count(1)
        self._tokens: Counter[str] = Counter()  # of unanswered requests, by tenant
        self._waiting: list[Request] = []
        self._running: list[tuple[list[Request], AsyncGenerator[None, None]]] = []
        self._work: asyncio.Task[Any] | None = None
        self._calling = asyncio.Lock()
        self._pool: ProcessPoolExecutor | None = None
        self._started = -RESTART_SECONDS
        self.pid: int | None = None

    @property
    def waiting(self) -> int:
        """Number of tokens of unanswered requests."""
        return self._tokens.total()

    def start(self) -> None:
        """Begins to start the process before the first request."""
        self._work = asyncio.create_task(self._call("pid"))

    async def close(self) -> None:
        """Stops the process, if one runs."""
        if self._work is not None:
            self._work.cancel()
        if (pool := self._pool) is not None:
            self._kill()
            await asyncio.to_thread(pool.shutdown)

    async def render(self, template: ChatTemplate, messages: Sequence[Mapping[str, Any]], tools: Tools = None) -> str:
        """Returns a conversation as a prompt. Raises InvalidConversation, and as `ask`."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                prompt: str = await self._call("render", template, messages, tools)
        except TimeoutError as error:
            raise ScorerLate from error
        return prompt

    async def ask(self, tenant: str, base: ServedBaseRef, texts: Sequence[Text]) -> AsyncGenerator[Any, None]:
        """Yields the answers to a request, see `Request`. Close the iterator to cancel it.

        Raises TooManyRequests, ScorerBusy, ScorerOff, ScorerStopped, ScorerLate, or an error of the worker.
        """
        request = Request(base, texts)
        # The only request always comes in, however long it is.
        if self._tokens[tenant] and self._tokens[tenant] + request.tokens > QUEUE_TOKENS // 2:
            raise TooManyRequests(
                "the tenant's texts that wait to be scored are as many as one tenant may have; wait for some of them",
                limit="scoring",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self.waiting and self.waiting + request.tokens > QUEUE_TOKENS:
            raise ScorerBusy
        self._tokens[tenant] += request.tokens
        self._meters.waiting.set(self.waiting)
        self._waiting.append(request)
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._run())
        try:
            while request.open or not request.answers.empty():
                async with asyncio.timeout(ANSWER_SECONDS):  # `wait_for` may lose a cancellation
                    answer = await request.answers.get()
                if isinstance(answer, Exception):
                    raise answer
                yield answer
        except TimeoutError as error:
            raise ScorerLate from error
        finally:
            request.open.clear()
            self._waiting = [other for other in self._waiting if other is not request]
            self._tokens[tenant] -= request.tokens
            self._tokens += Counter()  # forgets tenants without any
            self._meters.waiting.set(self.waiting)

    async def _run(self) -> None:
        """Runs batches until no request waits."""
        while self._waiting or self._running:
            while group := self._next_group():
                self._waiting = [request for request in self._waiting if request not in group]
                self._running.append((group, self._generate(group) if group[0].generates else self._score(group)))
            for run in list(self._running):
                group, batches = run
                try:
                    await anext(batches)
                    continue
                except StopAsyncIteration:
                    pass
                except Exception as error:
                    self._failed([request for request in group if request.open], error)
                self._running.remove(run)

    def _next_group(self) -> list[Request]:
        """Returns the first waiting request and those that can run with it; none while the first does not fit."""
        group: list[Request] = []
        used = sum(_text_bytes(running) for running, _ in self._running)
        for request in self._waiting:
            if not group or request.group == group[0].group:
                if used + _text_bytes([*group, request]) > self._text_bytes and (group or self._running):
                    break
                group.append(request)
        return group

    def _failed(self, requests: Sequence[Request], error: Exception) -> None:
        """Fails a request that was alone; several of the same batch go on alone."""
        for request in requests:
            if len(requests) == 1:
                request.fail(error)
            request.alone = True
        self._waiting[:0] = [request for request in requests if request.open]

    async def _score(self, group: Sequence[Request]) -> AsyncGenerator[None, None]:
        """Scores texts, those of small requests first. Yields after each batch."""
        ordered: list[Place] = []
        for request in sorted(group, key=lambda request: request.tokens):
            places = [(request, index) for index in request.open]
            ordered += sorted(places, key=lambda place: -len(place[0].texts[place[1]].tokens))
        for part in self._split(ordered):
            batch = sorted(((request, index) for request, index in part if index in request.open), key=_adapter)
            if batch:
                texts = [request.texts[index] for request, index in batch]
                scores = await self._call("score", group[0].base, texts)
                for (request, index), log_probabilities in zip(batch, scores, strict=True):
                    if index in request.open:
                        request.add(index, log_probabilities, "stop")
                yield

    async def _generate(self, group: Sequence[Request]) -> AsyncGenerator[None, None]:
        """Continues texts by one token in each batch. Yields after each batch."""
        if (nbytes := _text_bytes(group)) > self._text_bytes:
            raise ScorerFull(f"the texts take {nbytes} bytes; at most {self._text_bytes} are for texts. Ask for less")
        number = next(self._numbers)
        places = sorted(((request, index) for request in group for index in request.open), key=_adapter)
        texts = [request.rest(index) for request, index in places]
        await self._call("begin", number, group[0].base, texts)
        tokens: list[GeneratedToken | MobizoError] = []
        for part in self._split(places):
            start, stop = len(tokens), len(tokens) + len(part)
            tokens += await self._call("read", number, start, stop)
            yield
        rows = list(range(len(places)))
        while rows:
            for row, token in zip(rows, tokens, strict=True):
                request, index = places[row]
                request.add_token(index, token)
            rows = [row for row, (request, index) in enumerate(places) if index in request.open]
            tokens = await self._call("generate", number, rows)
            yield

    def _split(self, places: Sequence[Place]) -> Iterator[list[Place]]:
        """Yields consecutive texts whose tokens fit one batch, and whose adapters fit into memory."""
        batch: list[Place] = []
        longest, sizes = 0, dict[ServedAdapterRef | None, int]()
        for request, index in places:
            text = request.texts[index]
            longest = max(longest, len(text.tokens))
            sizes[text.adapter] = 0 if text.adapter is None else text.adapter.nbytes
            if batch and (longest * (len(batch) + 1) > BATCH_TOKENS or sum(sizes.values()) > self._adapter_bytes):
                yield batch
                batch, longest, sizes = [], len(text.tokens), {text.adapter: sizes[text.adapter]}
            batch.append((request, index))
        yield batch

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the process's `ServedModels`. Raises its errors, ScorerOff, ScorerStopped or ScorerLate."""
        async with self._calling:
            try:
                pool = self._pool or await self._start()
                try:
                    future = pool.submit(worker.call, method, *arguments)
                except BrokenProcessPool:  # it died while it had nothing to do
                    future = (await self._start()).submit(worker.call, method, *arguments)
                async with asyncio.timeout(CALL_SECONDS):
                    return await asyncio.wrap_future(future)
            except BrokenProcessPool as error:
                _log.error("scorer-died", pid=self.pid)
                self._pool = None
                raise ScorerStopped from error
            except TimeoutError as error:
                _log.error("scorer-hangs", pid=self.pid, method=method)
                self._kill()
                raise ScorerLate from error

    def _kill(self) -> None:
        """Ends the process; the next call starts another one."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._pool = None

    async def _start(self) -> ProcessPoolExecutor:
        """Starts a process. Raises ScorerOff or BrokenProcessPool."""
        if self._settings.scorer == "off":
            raise ScorerOff
        await asyncio.sleep(self._started + RESTART_SECONDS - time.monotonic())
        self._started, self.pid = time.monotonic(), None
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), worker.start, (self._settings, os.getpid()))
        self.pid = await asyncio.wrap_future(self._pool.submit(worker.call, "pid"))
        self._meters.starts.inc()
        _log.info("scorer-started", pid=self.pid)
        return self._pool


def _adapter(place: Place) -> tuple[str, str]:
    """Sorts texts so that neighbours share A, and B."""
    adapter = place[0].texts[place[1]].adapter
    return ("", "") if adapter is None else (adapter.family, adapter.sha256)


def _text_bytes(group: Sequence[Request]) -> int:
    """Returns the bytes of keys, values and adapters of texts while they are generated; 0 for texts to score."""
    texts = [text for request in group if request.generates for text in request.texts]
    adapters = {text.adapter: text.adapter.nbytes for text in texts if text.adapter is not None}
    longest = max((text.limit for text in texts), default=0)
    return len(texts) * longest * group[0].base.token_bytes + sum(adapters.values())


def make_scorer(state: AppState) -> Scorer:
    """Makes the scorer of one application."""
    return Scorer(state.settings, state.meters.part(ScorerMeters))
