"""A bound on heavy work at the same time, in which tenants take turns. Each process has its own."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import anyio.to_thread
from anyio import CapacityLimiter

from shared.errors import TooManyRequests

Result = TypeVar("Result")
MAX_WAITING = 100  # of one tenant


class TenantTurns:
    """Places for work. Use it only in the thread of the event loop.

    One tenant occupies all places but one, if there are several; the last is for the others. A place that becomes free
    goes to the tenant whose turn it is, and there to the work that has waited longest.
    """

    def __init__(self, name: str, places: int) -> None:
        """name: of the bound on waiting work, in the error."""
        self._name, self._places, self._share = name, places, max(1, places - 1)
        self._threads = CapacityLimiter(places)
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # the next tenant first

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Occupies a place, once it is the tenant's turn. Raises TooManyRequests if MAX_WAITING wait already."""
        waiting = self._waiting.get(tenant, deque())
        if len(waiting) >= MAX_WAITING:
            raise TooManyRequests(
                f"{len(waiting)} requests of the tenant wait for a turn", limit=self._name, retry_after_seconds=1
            )
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

    def _give_places(self) -> None:
        for tenant in list(self._waiting):
            if self._running.total() >= self._places:
                return
            waiting = self._waiting[tenant]
            while waiting and waiting[0].cancelled():
                waiting.popleft()
            if waiting and self._running[tenant] < self._share:
                self._running[tenant] += 1
                waiting.popleft().set_result(None)
                self._waiting.move_to_end(tenant)
            if not waiting:
                del self._waiting[tenant]
