"""The one way a job changes: along the state machine, with an event for those who watch. Knows no HTTP."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.jobs.models import Job
from server.jobs.repository import JobRepository
from shared.errors import Conflict
from shared.job import MOVES, JobState, Progress

JOB_EVENT, PROGRESS_EVENT = "job", "progress"


class JobLifecycle:
    """Changes to jobs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._jobs = JobRepository(session)

    def begin(self, job: Job) -> None:
        """Stores a new job; its first event shows it as it begins."""
        self._jobs.add(job)
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def move(self, job: Job, state: JobState, **changes: Any) -> None:
        """Moves a job to `state` and sets other columns with it. Raises Conflict if it cannot go there."""
        if state not in MOVES[job.state]:
            raise Conflict(f"job {job.id} is {job.state}; it cannot become {state}")
        job.state = state
        for name, value in changes.items():
            setattr(job, name, value)
        job.updated_at = utc_now()
        self._jobs.add_event(job, JOB_EVENT, job.view().model_dump_json())

    def progress(self, job: Job, progress: Progress) -> None:
        """Notes how training goes; the same again, as from a device that waits for hours, is no event."""
        job.updated_at = utc_now()
        if progress == job.progress:
            return
        job.progress = progress
        self._jobs.add_event(job, PROGRESS_EVENT, progress.model_dump_json())
