"""All SQL about jobs and their events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from server.db.columns import MOST
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.jobs.models import ENDED_WHOLE, PROGRESS_EVENT, Job, JobEvent
from shared.job import JobState

WANTING = (JobState.QUEUED, JobState.COMPILING)  # states in which a job waits for its program
OPEN = tuple(state for state in JobState if not state.final)


@dataclass(frozen=True)
class JobFilter:
    """Which jobs of a tenant are meant; None: whatever it is."""

    state: JobState | None = None
    user: str | None = None
    adapter: str | None = None


class JobRepository:
    """Jobs in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, job: Job) -> None:
        """Stores a new job."""
        self._session.add(job)
        self._session.flush()

    def get(self, tenant: str, job_id: str) -> Job | None:
        """A job of a tenant."""
        return self._session.scalar(select(Job).where(Job.tenant == tenant, Job.id == job_id))

    def get_locked(self, tenant: str, job_id: str) -> Job | None:
        """A job of a tenant that nobody else changes until the transaction ends."""
        return self._session.scalar(locked(select(Job).where(Job.tenant == tenant, Job.id == job_id)))

    def by_number(self, number: int) -> Job:
        """A job that is known to exist."""
        return self._session.get_one(Job, number)

    def page(self, tenant: str, request: PageRequest, chosen: JobFilter | None = None) -> PageRows[Job]:
        """Some of a tenant's jobs, newest first."""
        statement = select(Job).where(Job.tenant == tenant)
        if chosen is not None:
            for column, value in ((Job.state, chosen.state), (Job.user, chosen.user), (Job.adapter, chosen.adapter)):
                if value is not None:
                    statement = statement.where(column == value)
        return page_of(self._session, statement, Job, request)

    def wanting(self, recipe_id: str) -> Sequence[Job]:
        """Jobs that wait for the program of a recipe, oldest first; locked."""
        statement = select(Job).where(Job.recipe_id == recipe_id, Job.state.in_(WANTING)).order_by(Job.number)
        return self._session.scalars(locked(statement)).all()

    def is_wanted(self, recipe_id: str) -> bool:
        """Whether a job waits for the program of a recipe."""
        statement = select(Job.number).where(Job.recipe_id == recipe_id, Job.state.in_(WANTING))
        return self._session.scalar(statement.limit(1)) is not None

    def pinned(self, device_id: str) -> Sequence[Job]:
        """Open jobs that only this device may train; locked."""
        statement = select(Job).where(Job.only_device_id == device_id, Job.state.in_(OPEN)).order_by(Job.number)
        return self._session.scalars(locked(statement)).all()

    def other_user(self, tenant: str, adapter: str, user: str) -> str | None:
        """A user, not `user`, for whom an open job trains that adapter."""
        statement = select(Job.user).where(
            Job.tenant == tenant, Job.adapter == adapter, Job.user != user, Job.state.in_(OPEN)
        )
        return self._session.scalar(statement.limit(1))

    def add_event(self, job: Job, kind: str, data: str) -> None:
        """Appends to a job's events."""
        job.events += 1
        self._session.add(JobEvent(job_number=job.number, position=job.events, kind=kind, data=data))

    def events_after(self, job_number: int, position: int, limit: int) -> Sequence[JobEvent]:
        """A job's events after a position, in order."""
        statement = (
            select(JobEvent)
            .where(JobEvent.job_number == job_number, JobEvent.position > min(position, MOST))
            .order_by(JobEvent.position)
            .limit(limit)
        )
        return self._session.scalars(statement).all()

    def thin(self, before: datetime, limit: int) -> int:
        """Removes the progress of up to `limit` jobs that ended before a moment, and returns of how many."""
        ended = select(Job).where(ENDED_WHOLE, Job.updated_at < before).order_by(Job.updated_at).limit(limit)
        jobs = self._session.scalars(locked(ended, skip=True)).all()
        numbers = [job.number for job in jobs]
        gone = delete(JobEvent).where(JobEvent.job_number.in_(numbers), JobEvent.kind == PROGRESS_EVENT)
        self._session.execute(gone, execution_options={"synchronize_session": False})
        for job in jobs:
            job.thinned = True
        return len(jobs)
