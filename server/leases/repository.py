"""All SQL about leases, and about what devices declined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session, load_only

from server.jobs.models import Job
from server.leases.models import Ending, JobLease, MemoryDecline
from shared.job import JobState

DECLINE_LASTS = timedelta(hours=1)  # for a device that does not say what memory it has by now


class LeaseRepository:
    """Leases in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, lease: JobLease) -> None:
        """Stores a new lease."""
        self._session.add(lease)
        self._session.flush()

    def with_jobs(self, lease_ids: Collection[str]) -> list[tuple[JobLease, Job]]:
        """Leases and their jobs, locked until the transaction ends; of jobs only what a heartbeat looks at.

        The rest of a job is read when it is asked for: requests, tasks and recipes are most of what reading it costs.
        """
        statement = (
            select(JobLease, Job)
            .join(Job, Job.number == JobLease.job_number)
            .where(JobLease.id.in_(lease_ids))
            .order_by(Job.number)
            .options(load_only(Job.state, Job.events, Job.progress, Job.updated_at, Job.lane_number))
            .with_for_update(of=Job)
        )
        return [(lease, job) for lease, job in self._session.execute(statement)]

    def of_device(self, device_id: str, lease_id: str) -> JobLease | None:
        """A lease of that device, live or ended."""
        return self._session.scalar(select(JobLease).where(JobLease.device_id == device_id, JobLease.id == lease_id))

    def live(self, device_id: str, datasets: Collection[str]) -> JobLease | None:
        """The device's live lease on a job whose data set it still holds."""
        statement = (
            select(JobLease)
            .join(Job, Job.number == JobLease.job_number)
            .where(JobLease.device_id == device_id, JobLease.ending.is_(None), Job.dataset.in_(datasets))
            .order_by(JobLease.number)
        )
        return self._session.scalar(statement.limit(1))

    def lapsed(self, device_id: str, datasets: Collection[str]) -> JobLease | None:
        """The device's latest lease that expired and whose job waits, given to nobody since."""
        newer = JobLease.__table__.alias("newer")
        given_since = select(newer.c.number).where(
            newer.c.job_number == JobLease.job_number, newer.c.number > JobLease.number
        )
        statement = (
            select(JobLease)
            .join(Job, Job.number == JobLease.job_number)
            .where(
                JobLease.device_id == device_id,
                JobLease.ending == Ending.EXPIRED,
                Job.state == JobState.READY,
                Job.dataset.in_(datasets),
                ~given_since.exists(),
            )
            .order_by(JobLease.number.desc())
        )
        return self._session.scalar(statement.limit(1))

    def latest_of_job(self, job_number: int) -> JobLease | None:
        """The lease that a job was given last."""
        statement = select(JobLease).where(JobLease.job_number == job_number).order_by(JobLease.number.desc())
        return self._session.scalar(statement.limit(1))

    def declined(self, device_id: str, memory_bytes: int | None, now: datetime) -> frozenset[str]:
        """Recipes that a device declined and has not more memory for since; memory_bytes: that it can spare."""
        if memory_bytes is None:
            holds = MemoryDecline.declined_at > now - DECLINE_LASTS
        else:
            holds = MemoryDecline.enough_bytes > memory_bytes
        return frozenset(
            self._session.scalars(select(MemoryDecline.recipe_id).where(MemoryDecline.device_id == device_id, holds))
        )

    def note_decline(self, decline: MemoryDecline) -> None:
        """Stores what a device declined, in place of what it said of that recipe before."""
        self._session.merge(decline)

    def expired(self, job_number: int) -> int:
        """How many leases of a job ran out for good so far."""
        statement = select(func.count()).where(JobLease.job_number == job_number, JobLease.ending == Ending.EXPIRED)
        return self._session.scalars(statement).one()

    def overdue(self, now: datetime) -> Sequence[JobLease]:
        """Live leases whose time is over."""
        return self._session.scalars(select(JobLease).where(JobLease.ending.is_(None), JobLease.expires_at < now)).all()

    def live_of_device(self, device_id: str) -> Sequence[JobLease]:
        """All live leases of a device."""
        return self._session.scalars(
            select(JobLease).where(JobLease.device_id == device_id, JobLease.ending.is_(None))
        ).all()

    def cancel(self, job_number: int, now: datetime) -> None:
        """Ends the live lease of a cancelled job, if there is one."""
        self._session.execute(
            update(JobLease)
            .where(JobLease.job_number == job_number, JobLease.ending.is_(None))
            .values(ending=Ending.CANCELLED, ended_at=now)
        )
