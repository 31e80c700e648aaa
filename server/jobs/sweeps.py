"""Periodic work on jobs: submitting the next job of each series that is due, and removing old leases and events.

Any number of workers may do this at once. The next job of a series is submitted in the transaction in which the former
one stops being due; of jobs whose rows another worker has locked, nothing is removed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial

import structlog

from server.database.columns import utc_now
from server.database.database import Database
from server.jobs.leases.repository import LeaseRepository
from server.jobs.repository import JobRepository
from server.jobs.service import JobService
from server.storage.store import ArtifactStore
from server.tasks.sweeps import run_guarded
from shared.errors import MobizoError, QuotaExceeded, Unavailable

SERIES = "series"  # the name of the sweep
BATCH = 100  # jobs in one transaction, so that other writers wait only briefly
_log = structlog.get_logger()


def continue_series(database: Database, artifacts: ArtifactStore) -> None:
    """Submits the next job of every series in which it is due."""
    with database.reading() as session:
        due = JobRepository(session).due(utc_now())
    # Each series by itself, so that one that fails does not stop the others.
    for number in due:
        run_guarded(database, SERIES, partial(_repeat, database, artifacts, number), f"job {number}")


def _repeat(database: Database, artifacts: ArtifactStore, number: int) -> None:
    """Submits the job after one, or ends its series with the reason why it cannot be submitted."""
    try:
        with database.writing() as session:
            JobService(session, artifacts).repeat(number)
    except (QuotaExceeded, Unavailable):  # passes; the next sweep tries again
        raise
    except MobizoError as error:
        with database.writing() as session:
            job = JobRepository(session).by_number(number)
            if job.repeat_at is not None:
                job.end_series(error.detail)


def purge_events(database: Database, days: float, stopped: Callable[[], bool] = lambda: False) -> int:
    """Removes the leases and the progress events of jobs that ended longer ago. Returns the number of jobs.

    days: how long they are kept after the job has ended; 0: for ever. Other events of the jobs stay.
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
