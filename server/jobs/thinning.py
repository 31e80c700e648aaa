"""Forgetting how jobs that ended long ago trained: their progress events go, what became of them stays.

A worker looks now and then. Any number may: who is first takes some jobs, the others pass by. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import structlog

from server.clock import utc_now
from server.db.database import Database
from server.jobs.repository import JobRepository

LOOK_SECONDS = 3600.0
BATCH = 100  # jobs in a transaction: others write between two
_log = structlog.get_logger()


class Thinning:
    """The forgetting as a worker does it, between other things."""

    def __init__(self, database: Database, days: float, stopping: Callable[[], bool]) -> None:
        """days: that jobs keep everything after their end; 0: for ever."""
        self._database, self._days, self._stopping = database, timedelta(days=days), stopping
        self._next = time.monotonic()

    def look(self) -> None:
        """Thins what is old enough, if the last look is long enough ago."""
        if not self._days or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        jobs = self.thin()
        if jobs:
            _log.info("events-thinned", jobs=jobs)

    def thin(self) -> int:
        """Thins what is old enough; how many jobs that were."""
        before, jobs = utc_now() - self._days, 0
        while not self._stopping():
            with self._database.writing() as session:
                done = JobRepository(session).thin(before, BATCH)
            jobs += done
            if done < BATCH:
                break
        return jobs
