"""A bound on work at the same time, in which tenants take turns. Each process has its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from shared.errors import TooManyRequests

Result = TypeVar("Result")
MAX_WAITING = 100  # heavy work of one tenant
MAX_REQUESTS = 5_000  # waiting requests of one tenant, such as those of a fleet after an outage
RECENT_SECONDS = 5.0  # after its last work in which a tenant still has a share
# Of the request that is handled; "": of none, or of several tenants.
current_tenant: ContextVar[str] = ContextVar("current_tenant", default="")


@dataclass(frozen=True)
class Places:
    """How much work of one kind a process does at the same time. name: of the bound on waiting work, in its error.

    most: waiting work of one tenant.
    """

    name: str
    places: int
    most: int = MAX_WAITING

    def make(self, state: object) -> TenantTurns:
        """Makes the turns at these places, for `AppState.get`."""
        return TenantTurns(self)


class TenantTurns:
    """Places for work. Use it only in the thread of the event loop.

    A tenant alone has all places but one, if there are several. While there are other tenants, those of the last
    RECENT_SECONDS, they have equal shares of half of the places: fewer threads then compete for the interpreter. A
    place that becomes free goes to the tenant whose turn it is, and there to the work that has waited longest.
    """

    def __init__(self, places: Places) -> None:
        self._name, self._places, self._most = places.name, places.places, places.most
        self._recent: OrderedDict[str, float] = OrderedDict()  # when each tenant asked last, the longest ago first
        self._threads = CapacityLimiter(places.places)
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Occupies a place, once it is the tenant's turn. Raises TooManyRequests if too much waits already."""
        waiting = self._waiting.get(tenant, deque())
        if len(waiting) >= self._most:
            raise TooManyRequests(
                f"{len(waiting)} requests of the tenant wait for a turn", limit=self._name, retry_after_seconds=1
            )
        self._recent[tenant] = time.monotonic()
        self._recent.move_to_end(tenant)
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(place)
        self._give_places()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self._leave(tenant)
            raise
        try:
            yield
        finally:
            self._leave(tenant)

    async def run(self, tenant: str, work: Callable[..., Result], *args: object) -> Result:
        """Calls `work` in a thread once it is the tenant's turn."""
        async with self.turn(tenant):
            return await anyio.to_thread.run_sync(work, *args, limiter=self._threads)

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self._give_places()

    def _share(self) -> int:
        """The places that one tenant may occupy."""
        oldest = time.monotonic() - RECENT_SECONDS
        while self._recent and next(iter(self._recent.values())) < oldest:
            self._recent.popitem(last=False)
        tenants = len(self._recent)
        return max(1, self._places - 1 if tenants < 2 else self._places // (2 * tenants))

    def _give_places(self) -> None:
        share = self._share()
        for tenant in list(self._waiting):
            if self._running.total() >= self._places:
                return
            waiting = self._waiting[tenant]
            while waiting and waiting[0].cancelled():
                waiting.popleft()
            if waiting and self._running[tenant] < share:
                self._running[tenant] += 1
                waiting.popleft().set_result(None)
                self._waiting.move_to_end(tenant)
            if not waiting:
                del self._waiting[tenant]
