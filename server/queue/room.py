"""The waiting room: devices whose requests for a job wait in this process, and who of them is called when one is ready.

A job that becomes ready in this process calls a device at once. What other processes make ready is found by one look
at the database for everybody who waits, several times a second, and as soon as somebody comes. Either way as many
devices are called as there are jobs, the longest waiting first, and only such as may take them: however many come at
once, and however slow the database is then, no more of them write than there are jobs. Knows no HTTP and no lease.
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
    """A device that waits.

    called: ends when it may be its turn (the lane), or when nobody will be called any more (None).
    looked_at: ends when a look that began after it came has ended, or raises what that one met; or when it is called.
    """

    def __init__(self, asking: Asking) -> None:
        loop = asyncio.get_running_loop()
        self.asking = asking
        self.called: asyncio.Future[Line | None] = loop.create_future()
        self.looked_at: asyncio.Future[None] = loop.create_future()

    def call(self, line: Line | None) -> None:
        """Ends its wait."""
        self.called.set_result(line)
        self.look_ended(None)

    def look_ended(self, error: Exception | None) -> None:
        """A look is over."""
        if self.looked_at.done():
            return
        if error is None:
            self.looked_at.set_result(None)
        else:
            self.looked_at.set_exception(error)


class WaitingRoom:
    """Who waits in one process; belongs to the thread that runs the event loop."""

    def __init__(
        self, database: Database, closing: Closing, look_seconds: float, tidy: Callable[[], None] = lambda: None
    ) -> None:
        """look_seconds: between looks at the database. tidy: called, in a thread, before each look."""
        self._database, self._closing, self._look_seconds, self._tidy = database, closing, look_seconds, tidy
        # In the order of their coming: all, and by tenant and data set.
        self._waiters: dict[Waiter, None] = {}
        self._by_dataset: dict[tuple[str, str], dict[Waiter, None]] = {}
        self._new: list[Waiter] = []  # who came since the last look began
        self._busy: Counter[int] = Counter()  # called for a lane, and not yet back
        self._came = asyncio.Event()  # somebody, since the last look began
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[Found] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def waiting(self, asking: Asking) -> AsyncIterator[Waiter]:
        """Lets a device wait, until the block ends; one that was called counts as busy with a job until then."""
        self._listen()
        waiter = Waiter(asking)
        self._waiters[waiter] = None
        self._new.append(waiter)
        for key in _keys(asking):
            self._by_dataset.setdefault(key, {})[waiter] = None
        self._came.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_looking())
        try:
            yield waiter
        finally:
            self._leave(waiter)
            line = waiter.called.result() if waiter.called.done() else None
            if line is not None:
                self._busy[line.number] -= 1
                self._busy += Counter()  # drops zeros
            # Once nobody waits no look is under way, so that the database may be closed.
            if not self._waiters and self._looking is not None:
                await asyncio.wait([self._looking])

    async def called(self, waiter: Waiter, seconds: float) -> bool:
        """Waits until a device is called: True; False if the time is over, or the server stops.

        Looks once, however short the time. Raises what that look met.
        """
        until = asyncio.get_running_loop().time() + seconds
        await waiter.looked_at
        try:
            async with asyncio.timeout_at(until):
                # Shielded: whoever calls it at the last moment must find it whole.
                return await asyncio.shield(waiter.called) is not None
        except TimeoutError:
            return waiter.called.done() and waiter.called.result() is not None

    def call(self, line: Line, jobs: int) -> None:
        """Calls as many devices for jobs that wait in a lane."""
        for waiter in list(self._by_dataset.get((line.tenant, line.dataset), ())):
            if jobs <= 0:
                return
            if line.admits(waiter.asking):
                self._leave(waiter)
                self._busy[line.number] += 1
                waiter.call(line)
                jobs -= 1

    def _leave(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        for key in _keys(waiter.asking):
            waiters = self._by_dataset.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._by_dataset.pop(key, None)

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

    async def _keep_looking(self) -> None:
        """Looks until nobody waits, or the server stops."""
        while await self._time_to_look() and self._waiters:
            new, self._new = self._new, []
            self._looking = asyncio.create_task(run_in_threadpool(self._ready, self._wanted()))
            error = None
            try:
                for line, jobs in await self._looking:
                    # Those who were called before are after some of these jobs.
                    self.call(line, jobs - self._busy[line.number])
            except Exception as met:
                # Who waits already may as well wait until the database is back.
                error = met
                _log.warning("look-failed", error=str(met))
            finally:
                self._looking = None
            for waiter in new:
                waiter.look_ended(error)
        if self._closing.begun:
            for waiter in list(self._waiters):
                self._leave(waiter)
                waiter.call(None)

    async def _time_to_look(self) -> bool:
        """Waits until somebody comes, or for a while. False if the server stops."""
        pause = asyncio.create_task(self._closing.pause(self._look_seconds))
        came = asyncio.create_task(self._came.wait())
        await asyncio.wait({pause, came}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        came.cancel()
        self._came.clear()
        return not self._closing.begun

    def _wanted(self) -> dict[str, list[str]]:
        """Data sets that somebody waits for, by tenant."""
        wanted: dict[str, list[str]] = {}
        for tenant, dataset in self._by_dataset:
            wanted.setdefault(tenant, []).append(dataset)
        return wanted

    def _ready(self, wanted: Mapping[str, Sequence[str]]) -> Found:
        self._tidy()
        found: list[tuple[Line, int]] = []
        with self._database.glancing() as session:
            queue = QueueRepository(session)
            for tenant, datasets in wanted.items():
                for start in range(0, len(datasets), CHUNK):
                    found += queue.ready(tenant, datasets[start : start + CHUNK])
        return found


def _keys(asking: Asking) -> list[tuple[str, str]]:
    return [(asking.tenant, dataset) for dataset in asking.datasets]
