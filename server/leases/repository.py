"""All SQL about leases, and which job a device may take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.orm import Session

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

    def of_device(self, device_id: str, lease_id: str) -> JobLease | None:
        """A lease of that device, live or ended."""
        return self._session.scalar(select(JobLease).where(JobLease.device_id == device_id, JobLease.id == lease_id))

    def live(self, device_id: str, datasets: Sequence[str]) -> JobLease | None:
        """The device's live lease on a job whose data set it still holds."""
        statement = (
            select(JobLease)
            .join(Job, Job.number == JobLease.job_number)
            .where(JobLease.device_id == device_id, JobLease.ending.is_(None), Job.dataset.in_(datasets))
            .order_by(JobLease.number)
        )
        return self._session.scalar(statement.limit(1))

    def lapsed(self, device_id: str, datasets: Sequence[str]) -> JobLease | None:
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

    def waiting_job(
        self, tenant: str, device_id: str, datasets: Sequence[str], memory_bytes: int | None, now: datetime
    ) -> Job | None:
        """The oldest job that this device may train and can hold; locked until the transaction ends."""
        statement = (
            select(Job)
            .where(
                Job.tenant == tenant,
                Job.state == JobState.READY,
                Job.dataset.in_(datasets),
                or_(Job.only_device_id.is_(None), Job.only_device_id == device_id),
                ~self._too_large(device_id, memory_bytes, now),
            )
            .order_by(Job.number)
            .limit(1)
        )
        return self._session.scalar(statement.with_for_update(skip_locked=True))

    def _too_large(self, device_id: str, memory_bytes: int | None, now: datetime) -> ColumnElement[bool]:
        """Whether the device declined a job's recipe, and has not more memory since."""
        if memory_bytes is None:
            holds = MemoryDecline.declined_at > now - DECLINE_LASTS
        else:
            holds = MemoryDecline.enough_bytes > memory_bytes
        declined = select(MemoryDecline.recipe_id).where(
            MemoryDecline.device_id == device_id, MemoryDecline.recipe_id == Job.recipe_id, holds
        )
        return declined.exists()

    def note_decline(self, decline: MemoryDecline) -> None:
        """Stores what a device declined, in place of what it said of that recipe before."""
        self._session.merge(decline)

    def may_be_work(
        self, tenant: str, device_id: str, datasets: Sequence[str], memory_bytes: int | None, now: datetime
    ) -> bool:
        """Whether asking for a lease is worth a writing transaction: a job waits, or a lease has run out."""
        return bool(self.waiting_job(tenant, device_id, datasets, memory_bytes, now) or self.overdue(now))

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
