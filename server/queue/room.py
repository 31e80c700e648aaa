"""The waiting room: devices whose requests for a job wait in this process, and who of them is called when one is ready.

A job that becomes ready in this process calls a device at once. What other processes make ready is found by one look
at the database for everybody who waits, several times a second. Either way as many devices are called as there are
jobs, the longest waiting first, and only such as may take them. Knows no HTTP and no lease.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from server.closing import Closing
from server.db.database import Database
from server.queue.matching import Asking
from server.queue.readiness import noted_ready
from server.queue.repository import Line, QueueRepository

CHUNK = 500  # data sets in one query
_log = structlog.get_logger()

Found = Sequence[tuple[Line, int]]


class Waiter:
    """A device that waits; `called` ends when it may be its turn, or nobody will be called any more."""

    def __init__(self, asking: Asking) -> None:
        self.asking = asking
        self.called: asyncio.Future[Line | None] = asyncio.get_running_loop().create_future()


class WaitingRoom:
    """Who waits in one process; belongs to the thread that runs the event loop."""

    def __init__(
        self, database: Database, closing: Closing, look_seconds: float, tidy: Callable[[], None] = lambda: None
    ) -> None:
        """look_seconds: between looks at the database. tidy: called, in a thread, at each look."""
        self._database, self._closing, self._look_seconds, self._tidy = database, closing, look_seconds, tidy
        # By tenant and data set, in the order of their coming.
        self._waiters: dict[tuple[str, str], dict[Waiter, None]] = {}
        self._busy: Counter[int] = Counter()  # called for a lane, and not yet back
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[Found] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len({waiter for waiters in self._waiters.values() for waiter in waiters})

    @asynccontextmanager
    async def waiting(self, asking: Asking) -> AsyncIterator[Waiter]:
        """Lets a device wait, until the block ends."""
        self._listen()
        waiter = Waiter(asking)
        for key in _keys(asking):
            self._waiters.setdefault(key, {})[waiter] = None
        if asking.datasets and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._look())
        try:
            yield waiter
        finally:
            self._leave(waiter)
            if waiter.called.done() and not waiter.called.cancelled() and (line := waiter.called.result()):
                self._busy[line.number] -= 1
                if not self._busy[line.number]:
                    del self._busy[line.number]
            await self._rest()

    async def called(self, waiter: Waiter, seconds: float) -> bool:
        """Waits until a device is called: True; False if the time is over or the server stops."""
        try:
            async with asyncio.timeout(seconds):
                return await waiter.called is not None
        except TimeoutError:
            return False

    def call(self, line: Line, jobs: int) -> None:
        """Calls as many devices for jobs that wait in a lane."""
        for waiter in list(self._waiters.get((line.tenant, line.dataset), ())):
            if jobs <= 0:
                return
            if not waiter.called.done() and line.admits(waiter.asking):
                self._leave(waiter)
                self._busy[line.number] += 1
                waiter.called.set_result(line)
                jobs -= 1

    def _leave(self, waiter: Waiter) -> None:
        for key in _keys(waiter.asking):
            waiters = self._waiters.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._waiters.pop(key, None)

    def _listen(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._database.after_commit(self._hear)

    def _hear(self, session: Session) -> None:
        """After each commit, in the thread that made it."""
        if (lines := noted_ready(session)) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call_all, lines)

    def _call_all(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self.call(line, 1)

    async def _rest(self) -> None:
        """Once nobody waits no look is under way, so that the database may be closed."""
        if not self._waiters and self._looking is not None:
            await asyncio.wait([self._looking])

    async def _look(self) -> None:
        """Looks until nobody waits, or the server stops."""
        while not await self._closing.pause(self._look_seconds):
            if not self._waiters:
                return
            self._looking = asyncio.create_task(run_in_threadpool(self._ready, self._wanted()))
            try:
                found = await self._looking
            except Exception:
                # Whoever waits may as well wait until the database is back.
                _log.exception("look-failed")
                continue
            finally:
                self._looking = None
            for line, jobs in found:
                # Those who were called before are after some of these jobs.
                self.call(line, jobs - self._busy[line.number])
        for waiter in {waiter for waiters in self._waiters.values() for waiter in waiters}:
            self._leave(waiter)
            if not waiter.called.done():
                waiter.called.set_result(None)

    def _wanted(self) -> dict[str, list[str]]:
        """Data sets that somebody waits for, by tenant."""
        wanted: dict[str, list[str]] = {}
        for tenant, dataset in self._waiters:
            wanted.setdefault(tenant, []).append(dataset)
        return wanted

    def _ready(self, wanted: Mapping[str, Sequence[str]]) -> Found:
        self._tidy()
        found: list[tuple[Line, int]] = []
        with self._database.reading() as session:
            queue = QueueRepository(session)
            for tenant, datasets in wanted.items():
                for start in range(0, len(datasets), CHUNK):
                    found += queue.ready(tenant, datasets[start : start + CHUNK])
        return found


def _keys(asking: Asking) -> list[tuple[str, str]]:
    return [(asking.tenant, dataset) for dataset in asking.datasets]
