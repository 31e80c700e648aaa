"""Whether a worker's machine has memory for what waits, and when a try that crashed is made again.

The same for compiles and for conversions, which share their machines' memory. Knows neither.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from server.programs.models import WorkerHost
from server.programs.waiting import WaitingRepository
from server.settings import Settings

MOST_BACKOFF = timedelta(minutes=10)
HOST_LASTS = timedelta(minutes=5)  # a machine not heard from for longer is not one to wait for
PATIENCE = timedelta(minutes=10)  # what is large and waits longer keeps smaller ones from starting before it


class MemoryRoom:
    """The memory of one worker's machine; until the transaction ends no other worker there is given anything."""

    def __init__(self, waiting: WaitingRepository, worker_id: str, now: datetime) -> None:
        self._waiting = waiting
        self._now = now
        self.host: WorkerHost | None = waiting.locked_host(worker_id)

    def most_bytes(self) -> float:
        """What any machine may give to one piece of work; infinite unless an operator limited them all."""
        hosts = self._waiting.hosts(self._now - HOST_LASTS)
        if self.host is None or any(not each.limited for each in hosts):
            return float("inf")
        return max((each.memory_bytes for each in hosts), default=self.host.memory_bytes)

    def free_bytes(self) -> int:
        """What this machine's has left beside the work under way; may be negative."""
        return 0 if self.host is None else self.host.memory_bytes - self._waiting.used_bytes(self.host.name)

    def fits(self, memory_bytes: int) -> bool:
        """Whether that much may be begun here now: it fits, or it is alone and no operator said how much it may be."""
        if self.host is None:
            return True
        used = self._waiting.used_bytes(self.host.name)
        return memory_bytes <= self.host.memory_bytes - used or (used == 0 and not self.host.limited)

    def worth_waiting(self, memory_bytes: int, since: datetime) -> bool:
        """Whether nothing smaller is to start before it, since it would fit alone and has waited long."""
        return self.host is not None and memory_bytes <= self.host.memory_bytes and self._now - since > PATIENCE


def backoff(settings: Settings, attempts: int) -> timedelta:
    """How long to wait after so many tries that crashed."""
    return min(timedelta(seconds=settings.compile_backoff_seconds * 2 ** (attempts - 1)), MOST_BACKOFF)
