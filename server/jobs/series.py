"""Series: jobs that repeat. A job that ends notes when the next one of its series is due; a sweep submits that one.

Any number of workers may do this at once: the next job is submitted in the transaction in which the former one stops
being due.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from server.database.columns import utc_now
from server.database.database import Database
from server.jobs.repository import JobRepository
from server.jobs.service import JobService
from server.storage.store import ArtifactStore
from server.tasks.sweeps import run_guarded
from shared.errors import MobizoError, QuotaExceeded, Unavailable

SERIES = "series"  # the name of the sweep


@dataclass(frozen=True)
class SeriesWatch:
    """Runs the sweep in one worker."""

    database: Database
    artifacts: ArtifactStore

    def run(self) -> None:
        """Submits the next job of every series in which it is due."""
        with self.database.reading() as session:
            due = JobRepository(session).due(utc_now())
        # Each series by itself, so that one that fails does not stop the others.
        for number in due:
            run_guarded(self.database, SERIES, partial(self._repeat, number), f"job {number}")

    def _repeat(self, number: int) -> None:
        """Submits the job after one, or ends its series with the reason why it cannot be submitted."""
        try:
            with self.database.writing() as session:
                JobService(session, self.artifacts).repeat(number)
        except (QuotaExceeded, Unavailable):  # passes; the next sweep tries again
            raise
        except MobizoError as error:
            with self.database.writing() as session:
                job = JobRepository(session).by_number(number)
                if job.repeat_at is not None:
                    job.end_series(error.detail)
