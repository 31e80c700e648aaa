"""Long polling: devices whose requests for a job wait in this process, and which of them is woken for a ready job.

A job that becomes ready in this process wakes a device at once. Jobs that other processes make ready are found by
polling the database for all waiting devices, several times a second and whenever a device arrives. Either way at most
as many devices are woken as there are jobs, the longest waiting first, and only those that may take them: a burst of
devices or a slow database never causes more writing transactions than there are jobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import structlog
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.orm import Session

from server.database.database import Database
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import Lane, QueueRepository, noted_ready
from server.web.state import Shutdown

CHUNK = 500  # users in one query
_log = structlog.get_logger()

ReadyJobs = Sequence[tuple[Lane, int]]  # lanes, each with its number of ready jobs


class Waiter:
    """A waiting device.

    woken: the lane in which a job may be ready for the device; None if the server stops.
    polled: done once a poll that began after the device arrived has ended, or the device is woken; raises the error of
    that poll.
    """

    def __init__(self, offer: DeviceOffer) -> None:
        loop = asyncio.get_running_loop()
        self.offer = offer
        self.woken: asyncio.Future[Lane | None] = loop.create_future()
        self.polled: asyncio.Future[None] = loop.create_future()

    def wake(self, lane: Lane | None) -> None:
        """Ends the wait."""
        self.woken.set_result(lane)
        self.poll_ended(None)

    def poll_ended(self, error: Exception | None) -> None:
        """Records the end of a poll; only the first counts."""
        if self.polled.done():
            return
        if error is None:
            self.polled.set_result(None)
        else:
            self.polled.set_exception(error)


class LongPoll:
    """The waiting devices of one process. Used only by the thread that runs the event loop."""

    def __init__(
        self,
        database: Database,
        shutdown: Shutdown,
        poll_seconds: float,
        before_poll: Callable[[], None] = lambda: None,
    ) -> None:
        """poll_seconds: between two polls of the database. before_poll: called in a thread before each poll."""
        self._database, self._shutdown, self._poll_seconds = database, shutdown, poll_seconds
        self._before_poll = before_poll
        # In the order of arrival: all devices, and devices by tenant and user.
        self._waiters: dict[Waiter, None] = {}
        self._by_user: dict[tuple[str, str], dict[Waiter, None]] = {}
        self._new: list[Waiter] = []  # devices that arrived after the latest poll began
        self._busy: Counter[int] = Counter()  # by lane: devices that were woken and have not ended their requests
        self._arrived = asyncio.Event()  # a device arrived after the latest poll began
        self._task: asyncio.Task[None] | None = None
        self._poll: asyncio.Task[ReadyJobs] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def waiting(self, offer: DeviceOffer) -> AsyncIterator[Waiter]:
        """Lets a device wait inside the block. A woken device counts as busy with a job until the block ends."""
        self._listen()
        waiter = Waiter(offer)
        self._waiters[waiter] = None
        self._new.append(waiter)
        for key in _keys(offer):
            self._by_user.setdefault(key, {})[waiter] = None
        self._arrived.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._keep_polling())
        try:
            yield waiter
        finally:
            self._remove(waiter)
            lane = waiter.woken.result() if waiter.woken.done() else None
            if lane is not None:
                self._busy[lane.number] -= 1
                self._busy += Counter()  # drops zeros
            # No poll outlives the last waiter, so that the database may be closed.
            if not self._waiters and self._poll is not None:
                await asyncio.wait([self._poll])

    async def woken(self, waiter: Waiter, seconds: float) -> bool:
        """Waits until a device is woken and returns True; False after `seconds`, or if the server stops.

        Waits for at least one poll, however short the time. Raises the error of that poll.
        """
        until = asyncio.get_running_loop().time() + seconds
        await waiter.polled
        try:
            async with asyncio.timeout_at(until):
                # Shielded, so that the future stays usable if it is resolved at the moment of the timeout.
                return await asyncio.shield(waiter.woken) is not None
        except TimeoutError:
            return waiter.woken.done() and waiter.woken.result() is not None

    def wake(self, lane: Lane, jobs: int) -> None:
        """Wakes up to `jobs` devices for jobs of a lane."""
        for waiter in list(self._by_user.get((lane.tenant, lane.user), ())):
            if jobs <= 0:
                return
            if lane.admits(waiter.offer):
                self._remove(waiter)
                self._busy[lane.number] += 1
                waiter.wake(lane)
                jobs -= 1

    def _remove(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        for key in _keys(waiter.offer):
            waiters = self._by_user.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._by_user.pop(key, None)

    def _listen(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._database.after_commit(self._on_commit)

    def _on_commit(self, session: Session) -> None:
        """Called after each commit, in the thread that committed."""
        if (lanes := noted_ready(session)) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_each, lanes)

    def _wake_each(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self.wake(lane, 1)

    async def _keep_polling(self) -> None:
        """Polls until no device waits, or the server stops."""
        while await self._until_next_poll() and self._waiters:
            new, self._new = self._new, []
            self._poll = asyncio.create_task(run_in_threadpool(self._ready, self._users()))
            failure = None
            try:
                for lane, jobs in await self._poll:
                    # Busy devices, which were woken before, will take some of these jobs.
                    self.wake(lane, jobs - self._busy[lane.number])
            except Exception as error:
                # Devices that were already waiting go on waiting until the database is back.
                failure = error
                _log.warning("poll-failed", error=str(error))
            finally:
                self._poll = None
            for waiter in new:
                waiter.poll_ended(failure)
        if self._shutdown.begun:
            for waiter in list(self._waiters):
                self._remove(waiter)
                waiter.wake(None)

    async def _until_next_poll(self) -> bool:
        """Waits until a device arrives or the next poll is due. Returns False if the server stops."""
        pause = asyncio.create_task(self._shutdown.pause(self._poll_seconds))
        arrived = asyncio.create_task(self._arrived.wait())
        await asyncio.wait({pause, arrived}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        arrived.cancel()
        self._arrived.clear()
        return not self._shutdown.begun

    def _users(self) -> dict[str, list[str]]:
        """Returns the users of the waiting devices, by tenant."""
        users: dict[str, list[str]] = {}
        for tenant, user in self._by_user:
            users.setdefault(tenant, []).append(user)
        return users

    def _ready(self, users_by_tenant: Mapping[str, Sequence[str]]) -> ReadyJobs:
        self._before_poll()
        ready: list[tuple[Lane, int]] = []
        with self._database.autocommit() as session:
            queue = QueueRepository(session)
            for tenant, users in users_by_tenant.items():
                for start in range(0, len(users), CHUNK):
                    ready += queue.ready(tenant, users[start : start + CHUNK])
        return ready


def _keys(offer: DeviceOffer) -> list[tuple[str, str]]:
    return [(offer.tenant, user) for user in offer.users]
