"""The application state that every request shares: rate limits, the queue of writing transactions, and services.

Also the request's transaction, as FastAPI dependencies.

Rate limits are token buckets by token and by address. Each server process counts for itself; behind several, a client
gets as many times its rate. They are used from one thread, the event loop's.

Writing transactions wait in the queue as asyncio tasks, because the thread pool is small and one needs several threads
in sequence: for its dependency, its route and its commit. If requests waited for the database lock inside threads, they
could occupy all of them while the transaction that holds the lock finds none to continue in. SQLite admits one writer,
PostgreSQL fewer than there are threads. Tenants take turns in it.

With group commit, concurrent small writes of one kind share one transaction. A commit waits for the disk, and on SQLite
for every other writer, so its cost hardly depends on its size. Each caller gets its result only after the commit that
contains its write, so every result it sees is durable.

Grouped reads do the same for small reads of one kind: those that arrive while one runs share the next. Their processor
time is mostly that of a session and of the change of threads. A read begins after its request has arrived, so nothing
is cached: a revoked token is refused at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Generic, ParamSpec, TypeVar

from anyio import from_thread
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from fastapi import Depends, Request
from fastapi.concurrency import contextmanager_in_threadpool, run_in_threadpool
from sqlalchemy.orm import Session

from server.database.database import Database, DatabaseUnavailable
from server.settings import Settings
from server.storage.store import ArtifactStore
from server.web.middleware import Meters
from server.web.tenant_turns import MAX_REQUESTS, Places, TenantTurns, current_tenant
from shared.errors import TooManyRequests, Unauthorized

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Entered = TypeVar("Entered")
BURST_SECONDS = 10  # a token or address may send the requests of so many seconds at once after a pause
REFUSAL_RATE, REFUSAL_BURST = 0.5, 30  # rejected tokens of one address: per second, and at once after a pause
# Responses 429 of one sender a second, and at once after a pause; the seconds that one is held back at most.
REFUSED_RATE, REFUSED_BURST, MAX_HELD_SECONDS = 10.0, 20, 30.0
WRITERS = 16  # of the pool's 40 threads
Work = TypeVar("Work")
MAX_IN_GROUP = 200  # items in one transaction
Part = TypeVar("Part")
CAPACITY = 20_000  # buckets of one kind, about 4 MiB; a forgotten bucket counts as full
Clock = Callable[[], float]


class Buckets:
    """One token bucket for each key; beyond the capacity, the least recently used are forgotten."""

    def __init__(self, rate: float, burst: int, clock: Clock = time.monotonic, capacity: int = CAPACITY) -> None:
        """rate: requests a second in the long run. burst: requests at once after a pause."""
        self._rate, self._burst, self._clock, self._capacity = rate, burst, clock, capacity
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and as of when

    def __contains__(self, key: str) -> bool:
        return key in self._levels

    def __len__(self) -> int:
        return len(self._levels)

    def _remaining(self, key: str, now: float) -> float:
        remaining, since = self._levels.get(key, (float(self._burst), now))
        return min(float(self._burst), remaining + (now - since) * self._rate)

    def wait(self, key: str) -> float:
        """Returns the seconds until a request may be made; 0: now. Takes nothing."""
        return max(0.0, (1 - self._remaining(key, self._clock())) / self._rate)

    def take(self, key: str) -> float:
        """Takes one request and returns 0, or returns the seconds until one may be made."""
        now = self._clock()
        remaining = self._remaining(key, now)
        allowed = remaining >= 1
        self._levels[key] = (remaining - 1 if allowed else remaining, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return 0.0 if allowed else (1 - remaining) / self._rate

    def forget(self, key: str) -> None:
        """Drops a key's bucket."""
        self._levels.pop(key, None)


def place_of(address: str) -> str:
    """Returns what counts as one sender: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def address_of(request: Request) -> str:
    """Returns the caller's address."""
    return request.client.host if request.client else ""


def _burst(rate: float) -> int:
    return max(round(BURST_SECONDS * rate), 1)


class Limits:
    """The limits of one server process."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        self._tokens = Buckets(settings.token_rate, _burst(settings.token_rate), clock)
        self._addresses = Buckets(settings.address_rate, _burst(settings.address_rate), clock)
        self._refusals = Buckets(REFUSAL_RATE, REFUSAL_BURST, clock)
        self._refused: OrderedDict[int, float] = OrderedDict()  # when each sender's next 429 is due
        self._clock = clock

    def anonymous(self, address: str) -> None:
        """Counts a request without a token. Raises TooManyRequests."""
        _check("address", self._addresses.take(place_of(address)))

    def before(self, digest: str, address: str) -> None:
        """Counts a request whose token is not looked up yet. Raises TooManyRequests.

        From an address with too many rejected tokens only tokens that were valid before are looked up: guessing stops,
        and other clients behind the same address go on.
        """
        if digest in self._tokens:
            _check("token", self._tokens.take(digest))
        else:
            _check("refusals", self._refusals.wait(place_of(address)))

    def sender(self, digest: str, address: str) -> str:
        """Returns whose turn a request takes: a token's that was valid before, or else its address's."""
        return digest if digest in self._tokens else place_of(address)

    def good(self, digest: str) -> None:
        """Records that a token is valid."""
        if digest not in self._tokens:
            self._tokens.take(digest)

    def refused(self, digest: str, address: str) -> None:
        """Records that a token was rejected, which counts against the address."""
        self._tokens.forget(digest)
        self._refusals.take(place_of(address))

    @contextmanager
    def checking(self, digest: str, address: str) -> Iterator[None]:
        """Counts a request whose token the block looks up: it is `good`, or else the block raises Unauthorized.

        Raises as `before`.
        """
        self.before(digest, address)
        try:
            yield
        except Unauthorized:
            self.refused(digest, address)
            raise
        self.good(digest)

    def refusal_delay(self, sender: str) -> float:
        """Returns the seconds for which a response 429 is held back.

        A client that repeats refused requests at once would otherwise occupy the event loop with them.
        """
        key, now = hash(sender), self._clock()
        due = max(self._refused.pop(key, 0.0), now - REFUSED_BURST / REFUSED_RATE)
        due = min(due + 1 / REFUSED_RATE, now + MAX_HELD_SECONDS)
        self._refused[key] = due
        if len(self._refused) > CAPACITY:
            self._refused.popitem(last=False)
        return max(0.0, due - now)


def _check(limit: str, seconds: float) -> None:
    if seconds > 0:
        raise TooManyRequests(
            f"too many requests; the next is taken in {seconds:.1f} s",
            limit=limit,
            retry_after_seconds=round(seconds, 3),
        )


class WriteQueue:
    """The write queue of one database in one process. Use it only in the thread of the event loop."""

    def __init__(self, database: Database) -> None:
        writers = 1 if database.engine.dialect.name == "sqlite" else WRITERS
        self._turns = TenantTurns(Places("writes", writers, MAX_REQUESTS))
        self._database = database

    async def transact(self, write: Callable[[Session], Answer]) -> Answer:
        """Calls `write` in a writing transaction, in a thread once a writer's place is free."""

        def transaction() -> Answer:
            with self._database.writing() as session:
                return write(session)

        return await self.run(transaction)

    @asynccontextmanager
    async def holding(self, context: AbstractContextManager[Entered]) -> AsyncIterator[Entered]:
        """Enters and leaves a writing context in threads, while holding a place among the writers."""
        async with self._turns.turn(current_tenant.get()), contextmanager_in_threadpool(context) as entered:
            yield entered

    async def run(
        self, write: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Calls a writing function in a thread once a writer's place is free."""
        async with self._turns.turn(current_tenant.get()):
            return await run_in_threadpool(write, *args, **kwargs)

    def run_from_thread(self, write: Callable[[], Answer]) -> Answer:
        """Like `run`, for code in a thread of the event loop's pool, which waits."""
        return from_thread.run(self.run, write)


class Group(Generic[Work, Answer]):
    """Groups work of one kind: what arrives while a group is processed belongs to the next one.

    Use it only in the thread of the event loop.
    """

    def __init__(
        self, run: Callable[[Sequence[Work]], Awaitable[Sequence[Answer | Exception]]], most: int = MAX_IN_GROUP
    ) -> None:
        """run: processes a group; returns a result, or an exception, for each item. most: items in one group."""
        self._run, self._most = run, most
        self._waiting: list[tuple[Work, asyncio.Future[Answer]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, work: Work) -> Answer:
        """Processes an item together with others that wait. Raises the error of this item, or of the database."""
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((work, future))
        if self._task is None:
            self._task = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        current_tenant.set("")  # of this task alone
        try:
            while self._waiting:
                group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._answer(group)
        finally:
            self._task = None

    async def _answer(self, group: Sequence[tuple[Work, asyncio.Future[Answer]]]) -> None:
        answers: Sequence[Answer | Exception]
        try:
            answers = await self._run([work for work, _ in group])
        except DatabaseUnavailable as error:
            answers = [error] * len(group)
        except Exception as error:
            if len(group) > 1:
                # One item may have made the whole group fail.
                for piece in group:
                    await self._answer([piece])
                return
            answers = [error]
        for (_, future), answer in zip(group, answers, strict=True):
            if future.done():
                continue  # its request was cancelled
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


def group_commit(
    write_queue: WriteQueue,
    write: Callable[[Session, Sequence[Work]], Sequence[Answer | Exception]],
    most: int = MAX_IN_GROUP,
) -> Group[Work, Answer]:
    """Makes a group of writes. write: applies several items in a transaction, and returns as `run` of a group."""

    async def run(work: Sequence[Work]) -> Sequence[Answer | Exception]:
        return await write_queue.transact(lambda session: write(session, work))

    return Group(run, most)


def group_read(
    database: Database, read: Callable[[Session, Sequence[Work]], Sequence[Answer | Exception]]
) -> Group[Work, Answer]:
    """Makes a group of reads. read: reads several items, and returns as `run` of a group."""

    def query(work: Sequence[Work]) -> Sequence[Answer | Exception]:
        with database.autocommit() as session:
            return read(session, work)

    async def run(work: Sequence[Work]) -> Sequence[Answer | Exception]:
        # Without what `run_in_threadpool` does for requests that are cancelled: groups are not.
        return await asyncio.get_running_loop().run_in_executor(None, query, work)

    return Group(run)


class Shutdown:
    """A one-way flag. Use it only in the thread of the event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def begun(self) -> bool:
        """Whether the server is stopping."""
        return self._event.is_set()

    def begin(self) -> None:
        """Ends every `pause` now."""
        self._event.set()

    async def pause(self, seconds: float) -> bool:
        """Waits for `seconds` or until the server stops. Returns whether it is stopping."""
        if not self.begun:
            try:
                async with asyncio.timeout(seconds):
                    await self._event.wait()
            except TimeoutError:
                pass
        return self.begun


@dataclass(frozen=True)
class AppState:
    """The shared parts of one running server, created once by `server.app`.

    Features have parts of their own: `state.get(make)`, where `make` is a function of the feature.
    """

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    public_key: Ed25519PublicKey
    started_at: datetime
    meters: Meters = field(default_factory=Meters)
    shutdown: Shutdown = field(default_factory=Shutdown)
    _parts: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False, compare=False)

    def get(self, make: Callable[[AppState], Part]) -> Part:
        """Returns the part that `make` makes, once, at the first call."""
        with self._lock:
            if make not in self._parts:
                self._parts[make] = make(self)
            part: Part = self._parts[make]
            return part

    @cached_property
    def write_queue(self) -> WriteQueue:
        """The queue of writing transactions."""
        return WriteQueue(self.database)

    @cached_property
    def limits(self) -> Limits:
        """Rate limits by token and address."""
        return Limits(self.settings)


# async, so that FastAPI does not call it in a thread.
async def _state(request: Request) -> AppState:
    state: AppState = request.app.state.mobizo
    return state


State = Annotated[AppState, Depends(_state)]


def _reading(state: State) -> Iterator[Session]:
    with state.database.reading() as session:
        yield session


async def _writing(state: State) -> AsyncIterator[Session]:
    async with state.write_queue.holding(state.database.writing()) as session:
        yield session


# "function": the transaction ends before the response is sent, so that a client that has it finds its write.
Reading = Annotated[Session, Depends(_reading, scope="function")]
Writing = Annotated[Session, Depends(_writing, scope="function")]
