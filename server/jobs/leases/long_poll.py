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
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.jobs.leases.repository import LeaseRepository
from server.jobs.leases.service import LeaseService
from server.jobs.scheduling.matching import DeviceOffer
from server.jobs.scheduling.repository import CHUNK, Lane, QueueRepository, marked_ready
from server.web.state import AppState, Shutdown

LOOK_SECONDS = 0.1  # between two searches for jobs that another process made ready, while devices wait here
_log = structlog.get_logger()

ReadyJobs = Sequence[tuple[Lane, int]]  # lanes, each with its number of ready jobs


@dataclass(frozen=True)
class Arrival:
    """A device that asks for a job: its offer, and the jobs of its users that were ready.

    changes: how many changes the long poll had noticed before the jobs were read.
    """

    offer: DeviceOffer
    ready: ReadyJobs
    changes: int


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
        before_search: Callable[[Session], None] = lambda session: None,
    ) -> None:
        """poll_seconds: between two polls of the database.

        before_search: called in a thread before each search, with its session.
        """
        self._database, self._shutdown, self._poll_seconds = database, shutdown, poll_seconds
        self._before_search = before_search
        self._turns: deque[tuple[str, str]] = deque()  # tenants and users that periodic polls look at next
        # In the order of arrival: all devices, and devices by tenant and user.
        self._waiters: dict[Waiter, None] = {}
        self._by_user: dict[tuple[str, str], dict[Waiter, None]] = {}
        self._new: list[Waiter] = []  # devices for which no search was made since they arrived
        self.changes = 0  # commits of this process that made jobs ready, as far as they were noticed
        self._busy: Counter[int] = Counter()  # by lane: devices that were woken and have not ended their requests
        self._arrived = asyncio.Event()  # a device arrived after the latest poll began
        self._task: asyncio.Task[None] | None = None
        self._poll: asyncio.Future[ReadyJobs] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._waiters)

    @asynccontextmanager
    async def waiting(self, offer: DeviceOffer, arrival: Arrival | None = None) -> AsyncIterator[Waiter]:
        """Lets a device wait inside the block. A woken device counts as busy with a job until the block ends.

        arrival: what was found when it arrived; None: a search follows at once.
        """
        self.listen()
        waiter = Waiter(offer)
        self._waiters[waiter] = None
        for key in _keys(offer):
            self._by_user.setdefault(key, {})[waiter] = None
        if arrival is not None and arrival.changes == self.changes:
            self._wake_for(arrival.ready)
            waiter.poll_ended(None)
        else:
            self._new.append(waiter)
            self._arrived.set()
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
        """Waits until a device is woken and returns True; False after `seconds`, or if the server stops.

        Waits for at least one poll, however short the time. Raises the error of that poll.
        """
        if waiter.woken.done():
            return waiter.woken.result() is not None
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

    def listen(self) -> None:
        """Begins to notice jobs that become ready in this process. Later calls do nothing."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._database.after_commit(self._on_commit)

    def _on_commit(self, session: Session) -> None:
        """Called after each commit, in the thread that committed."""
        if (lanes := marked_ready(session)) and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_each, lanes)

    def _wake_each(self, lanes: Sequence[Lane]) -> None:
        self.changes += 1
        for lane in lanes:
            self.wake(lane, 1)

    def _wake_for(self, ready: ReadyJobs) -> None:
        for lane, jobs in ready:
            # Busy devices, which were woken before, will take some of these jobs.
            self.wake(lane, jobs - self._busy[lane.number])

    async def _keep_polling(self) -> None:
        """Polls until no device waits, or the server stops."""
        loop = asyncio.get_running_loop()
        clock = loop.time
        due = clock() + self._poll_seconds
        while await self._until_next_poll(due - clock()) and self._waiters:
            new, self._new = self._new, []
            keys = {key for waiter in new for key in _keys(waiter.offer)}
            if clock() >= due:
                due = clock() + self._poll_seconds
                keys |= self._next_turn()
            self._poll = loop.run_in_executor(None, self._ready, _by_tenant(keys))
            failure = None
            try:
                self._wake_for(await self._poll)
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

    async def _until_next_poll(self, seconds: float) -> bool:
        """Waits until a device arrives or the next poll is due. Returns False if the server stops."""
        pause = asyncio.create_task(self._shutdown.pause(max(seconds, 0)))
        arrived = asyncio.create_task(self._arrived.wait())
        await asyncio.wait({pause, arrived}, return_when=asyncio.FIRST_COMPLETED)
        pause.cancel()
        arrived.cancel()
        self._arrived.clear()
        return not self._shutdown.begun

    def _next_turn(self) -> set[tuple[str, str]]:
        """Returns up to CHUNK of the tenants and users that have waiting devices; all have their turn, in order."""
        if not self._turns:
            self._turns.extend(self._by_user)
        return {self._turns.popleft() for _ in range(min(CHUNK, len(self._turns)))}

    def _ready(self, users_by_tenant: Mapping[str, Sequence[str]]) -> ReadyJobs:
        with self._database.autocommit() as session:
            return self._search(session, users_by_tenant)

    def _search(self, session: Session, users_by_tenant: Mapping[str, Sequence[str]]) -> ReadyJobs:
        self._before_search(session)
        queue, ready = QueueRepository(session), list[tuple[Lane, int]]()
        for tenant, users in users_by_tenant.items():
            for start in range(0, len(users), CHUNK):
                ready += queue.ready(tenant, users[start : start + CHUNK])
        return ready

    def arrivals(
        self, session: Session, offers: Sequence[DeviceOffer | Exception], changes: int
    ) -> list[Arrival | Exception]:
        """Reads the ready jobs of devices' users. Called in a thread. changes: `changes` before anything was read."""
        keys = {key for offer in offers if isinstance(offer, DeviceOffer) for key in _keys(offer)}
        ready: dict[tuple[str, str], list[tuple[Lane, int]]] = {}
        for lane, jobs in self._search(session, _by_tenant(keys)):
            ready.setdefault((lane.tenant, lane.user), []).append((lane, jobs))
        return [
            offer
            if isinstance(offer, Exception)
            else Arrival(offer, [each for key in _keys(offer) for each in ready.get(key, ())], changes)
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
    """Makes the long poll of devices that wait for a job. Overdue leases are taken back before each poll."""

    def take_back_overdue(reading: Session) -> None:
        if not LeaseRepository(reading).overdue(utc_now()):
            return
        reading.rollback()  # gives its connection back; on SQLite, what is read next is as of now
        with state.database.writing() as session:
            LeaseService(session, state.settings.lease_seconds).take_back_overdue()

    return LongPoll(state.database, state.shutdown, LOOK_SECONDS, take_back_overdue)
