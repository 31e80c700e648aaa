"""The long poll: devices that wait for a job, and the searches that find one for them.

A job that becomes ready in this process wakes a device at once. Jobs that other processes make ready are found by
polling the database: several times a second for up to CHUNK users of waiting devices, by turns, and for the users of a
device when it arrives, together with what else is read about it. The cost of a search thus does not grow with the
number of waiting devices. Either way at most as many devices are woken as there are jobs, the longest waiting first,
and only those that may take them: a burst of devices or a slow database never causes more writing transactions than
there are jobs.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import take_back_overdue
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import CHUNK, Lane, QueueRepository, marked_ready
from server.web.state import AppState, Shutdown

LOOK_SECONDS = 0.1  # between two searches for jobs that another process made ready, while devices wait here
_log = structlog.get_logger()

ReadyJobs = Sequence[tuple[Lane, int]]  # lanes, each with its number of ready jobs


@dataclass(frozen=True)
class Arrival:
    """A device that asks for a job: its offer, and the jobs of its users that were ready."""

    offer: DeviceOffer
    ready: ReadyJobs


class Waiter:
    """A waiting device. woken: the lane in which a job may be ready for the device; None if the server stops."""

    def __init__(self, offer: DeviceOffer) -> None:
        self.offer = offer
        self.woken: asyncio.Future[Lane | None] = asyncio.get_running_loop().create_future()


class LongPoll:
    """The waiting devices of one process. Used only by the thread that runs the event loop."""

    def __init__(self, database: Database, shutdown: Shutdown) -> None:
        self._database, self._shutdown = database, shutdown
        self._turns: deque[tuple[str, str]] = deque()  # tenants and users that periodic polls look at next
        # In the order of arrival: all devices, and devices by tenant and user.
        self._waiters: dict[Waiter, None] = {}
        self._by_user: dict[tuple[str, str], dict[Waiter, None]] = {}
        self._busy: Counter[int] = Counter()  # by lane: devices that were woken and have not ended their requests
        self._task: asyncio.Task[None] | None = None
        self._poll: asyncio.Future[ReadyJobs] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def waiting(self, offer: DeviceOffer, ready: ReadyJobs) -> AsyncIterator[Waiter]:
        """Lets a device wait inside the block. A woken device counts as busy with a job until the block ends.

        ready: the jobs of its users that were found when it arrived.
        """
        self._listen()
        waiter = Waiter(offer)
        self._waiters[waiter] = None
        for key in _keys(offer):
            self._by_user.setdefault(key, {})[waiter] = None
        self._wake_for(ready)
        if not waiter.woken.done() and (self._task is None or self._task.done()):
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
        """Waits until a device is woken and returns True; False after `seconds`, or if the server stops."""
        if waiter.woken.done():
            return waiter.woken.result() is not None
        try:
            async with asyncio.timeout(seconds):
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
                waiter.woken.set_result(lane)
                jobs -= 1

    def _remove(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        for key in _keys(waiter.offer):
            waiters = self._by_user.get(key, {})
            waiters.pop(waiter, None)
            if not waiters:
                self._by_user.pop(key, None)

    def _listen(self) -> None:
        """Begins to notice jobs that become ready in this process. Later calls do nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._database.after_commit(self._on_commit)

    def _on_commit(self, session: Session) -> None:
        """Called after each commit, in the thread that committed."""
        if (lanes := marked_ready(session)) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_each, lanes)

    def _wake_each(self, lanes: Sequence[Lane]) -> None:
        for lane in lanes:
            self.wake(lane, 1)

    def _wake_for(self, ready: ReadyJobs) -> None:
        for lane, jobs in ready:
            # Busy devices, which were woken before, will take some of these jobs.
            self.wake(lane, jobs - self._busy[lane.number])

    async def _keep_polling(self) -> None:
        """Polls until no device waits, or the server stops."""
        loop = asyncio.get_running_loop()
        while not await self._shutdown.pause(LOOK_SECONDS) and self._waiters:
            self._poll = loop.run_in_executor(None, self._ready, _by_tenant(self._next_turn()))
            try:
                self._wake_for(await self._poll)
            except Exception as error:
                # Devices go on waiting until the database is back.
                _log.warning("poll-failed", error=str(error))
            finally:
                self._poll = None
        if self._shutdown.begun:
            for waiter in list(self._waiters):
                self._remove(waiter)
                waiter.woken.set_result(None)

    def _next_turn(self) -> set[tuple[str, str]]:
        """Returns up to CHUNK of the tenants and users that have waiting devices; all have their turn, in order."""
        if not self._turns:
            self._turns.extend(self._by_user)
        return {self._turns.popleft() for _ in range(min(CHUNK, len(self._turns)))}

    def _ready(self, users_by_tenant: Mapping[str, Sequence[str]]) -> ReadyJobs:
        with self._database.autocommit() as session:
            return self._search(session, users_by_tenant)

    def _search(self, session: Session, users_by_tenant: Mapping[str, Sequence[str]]) -> ReadyJobs:
        """Returns the ready jobs of users, after overdue leases were taken back."""
        if LeaseRepository(session).overdue(utc_now()):
            session.rollback()  # gives its connection back; on SQLite, what is read next is as of now
            with self._database.writing() as writing:
                take_back_overdue(writing)
        queue, ready = QueueRepository(session), list[tuple[Lane, int]]()
        for tenant, users in users_by_tenant.items():
            for start in range(0, len(users), CHUNK):
                ready += queue.ready(tenant, users[start : start + CHUNK])
        return ready

    def arrivals(self, session: Session, offers: Sequence[DeviceOffer | Exception]) -> list[Arrival | Exception]:
        """Reads the ready jobs of devices' users. Called in a thread."""
        keys = {key for offer in offers if isinstance(offer, DeviceOffer) for key in _keys(offer)}
        ready: dict[tuple[str, str], list[tuple[Lane, int]]] = {}
        for lane, jobs in self._search(session, _by_tenant(keys)):
            ready.setdefault((lane.tenant, lane.user), []).append((lane, jobs))
        return [
            offer
            if isinstance(offer, Exception)
            else Arrival(offer, [each for key in _keys(offer) for each in ready.get(key, ())])
            for offer in offers
        ]


def _by_tenant(keys: Collection[tuple[str, str]]) -> dict[str, list[str]]:
    users: dict[str, list[str]] = {}
    for tenant, user in keys:
        users.setdefault(tenant, []).append(user)
    return users


def _keys(offer: DeviceOffer) -> list[tuple[str, str]]:
    return [(offer.tenant, user) for user in offer.users]


def make_long_poll(state: AppState) -> LongPoll:
    """Makes the long poll of devices that wait for a job."""
    return LongPoll(state.database, state.shutdown)
