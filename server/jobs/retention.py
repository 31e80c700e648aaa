"""Retention: removes the leases and the progress events of jobs that ended long ago. Their other events stay.

Any number of workers may do this at once: each locks some jobs, and the others skip these.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import structlog

from server.database.columns import utc_now
from server.database.database import Database
from server.jobs.leases.repository import LeaseRepository
from server.jobs.repository import JobRepository

BATCH = 100  # jobs in one transaction, so that other writers wait only briefly
_log = structlog.get_logger()


class EventPurge:
    """The sweep of a worker that removes old progress events."""

    def __init__(self, database: Database, days: float, stopping: Callable[[], bool]) -> None:
        """days: how long events are kept after the job has ended; 0: for ever."""
        self._database, self._days, self._stopping = database, timedelta(days=days), stopping

    def run(self) -> None:
        """Purges old events unless they are kept for ever."""
        if not self._days:
            return
        jobs = self.purge()
        if jobs:
            _log.info("events-purged", jobs=jobs)

    def purge(self) -> int:
        """Purges old events and returns the number of jobs."""
        before, jobs = utc_now() - self._days, 0
        while not self._stopping():
            with self._database.writing() as session:
                numbers = JobRepository(session).purge_events(before, BATCH)
                LeaseRepository(session).purge(numbers)
            jobs += len(numbers)
            if len(numbers) < BATCH:
                break
        return jobs
