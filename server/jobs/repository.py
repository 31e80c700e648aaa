"""All SQL about jobs and their events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, or_, select
from sqlalchemy.orm import Session

from server.catalog.calibrations.service import names_calibration
from server.database.columns import MOST
from server.database.locking import locked
from server.database.paging import PageRequest, PageRows, page_of
from server.jobs.models import NOT_PURGED, PROGRESS_EVENT, Job, JobEvent
from shared.job import JobState

AWAITING_PROGRAM = (JobState.QUEUED, JobState.COMPILING)  # states in which a job waits for its program
OPEN = tuple(state for state in JobState if not state.final)


@dataclass(frozen=True)
class JobFilter:
    """Selects jobs of a tenant; None matches any value."""

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
        """Returns a job of a tenant."""
        return self._session.scalar(select(Job).where(Job.tenant == tenant, Job.id == job_id))

    def get_locked(self, tenant: str, job_id: str) -> Job | None:
        """Returns a job of a tenant, locked until the transaction ends."""
        return self._session.scalar(locked(select(Job).where(Job.tenant == tenant, Job.id == job_id)))

    def by_number(self, number: int) -> Job:
        """Returns a job that is known to exist."""
        return self._session.get_one(Job, number)

    def page(self, tenant: str, request: PageRequest, chosen: JobFilter | None = None) -> PageRows[Job]:
        """Returns a page of a tenant's jobs, newest first."""
        statement = select(Job).where(Job.tenant == tenant)
        if chosen is not None:
            for column, value in ((Job.state, chosen.state), (Job.user, chosen.user), (Job.adapter, chosen.adapter)):
                if value is not None:
                    statement = statement.where(column == value)
        return page_of(self._session, statement, Job, request)

    def awaiting_program(self, recipe_id: str) -> Sequence[Job]:
        """Returns the jobs that wait for the program of a recipe, oldest first and locked."""
        statement = select(Job).where(Job.recipe_id == recipe_id, Job.state.in_(AWAITING_PROGRAM)).order_by(Job.number)
        return self._session.scalars(locked(statement)).all()

    def pinned(self, device_id: str) -> Sequence[Job]:
        """Returns the open jobs that only this device may train, locked."""
        statement = select(Job).where(Job.only_device_id == device_id, Job.state.in_(OPEN)).order_by(Job.number)
        return self._session.scalars(locked(statement)).all()

    def pinned_of(self, device_id: str, user: str) -> Sequence[Job]:
        """Returns the open jobs of a user that only this device may train, locked.

        Also those of other users that start from the user's adapter.
        """
        whose = or_(Job.user == user, Job.start_user == user)
        statement = select(Job).where(Job.only_device_id == device_id, whose, Job.state.in_(OPEN)).order_by(Job.number)
        return self._session.scalars(locked(statement)).all()

    def other_user(self, tenant: str, adapter: str, user: str) -> str | None:
        """Returns a user other than `user` whose open job trains that adapter."""
        statement = select(Job.user).where(
            Job.tenant == tenant, Job.adapter == adapter, Job.user != user, Job.state.in_(OPEN)
        )
        return self._session.scalar(statement.limit(1))

    def add_event(self, job: Job, kind: str, data: str) -> None:
        """Appends an event to a job's events."""
        job.events += 1
        self._session.add(JobEvent(job_number=job.number, position=job.events, kind=kind, data=data))

    def events_after(self, job_number: int, position: int, limit: int) -> Sequence[JobEvent]:
        """Returns a job's events after a position, in order."""
        statement = (
            select(JobEvent)
            .where(JobEvent.job_number == job_number, JobEvent.position > min(position, MOST))
            .order_by(JobEvent.position)
            .limit(limit)
        )
        return self._session.scalars(statement).all()

    def event_counts(self, numbers: set[int]) -> dict[int, int]:
        """Returns how many events each of these jobs has had."""
        statement = select(Job.number, Job.events).where(Job.number.in_(numbers))
        return {number: events for number, events in self._session.execute(statement)}  # noqa: C416  rows are not pairs

    def purge_events(self, before: datetime, limit: int) -> int:
        """Removes the progress events of up to `limit` jobs that ended before a time. Returns how many."""
        ended = select(Job).where(NOT_PURGED, Job.updated_at < before).order_by(Job.updated_at).limit(limit)
        jobs = self._session.scalars(locked(ended, skip=True)).all()
        numbers = [job.number for job in jobs]
        progress = delete(JobEvent).where(JobEvent.job_number.in_(numbers), JobEvent.kind == PROGRESS_EVENT)
        self._session.execute(progress, execution_options={"synchronize_session": False})
        for job in jobs:
            job.purged = True
        return len(jobs)


def job_with_calibration(session: Session, sha256: str) -> str | None:
    """Returns the name of an unfinished job whose A comes from the calibration of that sha256."""
    job = session.scalar(select(Job.id).where(Job.state.in_(OPEN), names_calibration(Job.recipe, sha256)).limit(1))
    return None if job is None else f"job {job}"
