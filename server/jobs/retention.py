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


def purge_events(database: Database, days: float, stopped: Callable[[], bool] = lambda: False) -> int:
    """Removes the events of jobs that ended longer ago. Returns the number of jobs. For a sweep of any worker.

    days: how long events are kept after the job has ended; 0: for ever.
    """
    before, jobs = utc_now() - timedelta(days=days), 0
    found = BATCH if days else 0
    while found == BATCH and not stopped():
        with database.writing() as session:
            numbers = JobRepository(session).purge_events(before, BATCH)
            LeaseRepository(session).purge(numbers)
        found = len(numbers)
        jobs += found
    if jobs:
        _log.info("events-purged", jobs=jobs)
    return jobs
