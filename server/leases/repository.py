"""All SQL about leases, and which job a device may take."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Select, or_, select, update
from sqlalchemy.orm import Session

from server.db.locking import locked
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
        """A lease of that device, live or ended, with its job locked."""
        chosen = JobLease.device_id == device_id, JobLease.id == lease_id
        return self._guarded(select(JobLease.job_number).where(*chosen), *chosen)

    def live(self, device_id: str, datasets: Sequence[str]) -> JobLease | None:
        """The device's live lease on a job whose data set it still holds, with its job locked."""
        live = JobLease.device_id == device_id, JobLease.ending.is_(None)
        number = (
            select(JobLease.job_number)
            .join(Job, Job.number == JobLease.job_number)
            .where(*live, Job.dataset.in_(datasets))
            .order_by(JobLease.number)
        )
        return self._guarded(number.limit(1), *live)

    def lapsed(self, device_id: str, datasets: Sequence[str]) -> JobLease | None:
        """The device's latest lease that expired and whose job waits, given to nobody since; with its job locked."""
        newer = JobLease.__table__.alias("newer")
        given_since = (
            select(newer.c.number)
            .where(newer.c.job_number == JobLease.job_number, newer.c.number > JobLease.number)
            .correlate(JobLease)
            .exists()
        )
        expired = JobLease.device_id == device_id, JobLease.ending == Ending.EXPIRED, ~given_since
        number = (
            select(JobLease.job_number)
            .join(Job, Job.number == JobLease.job_number)
            .where(*expired, Job.state == JobState.READY, Job.dataset.in_(datasets))
            .order_by(JobLease.number.desc())
        )
        lease = self._guarded(number.limit(1), *expired)
        return lease if lease is not None and self._state(lease) is JobState.READY else None

    def _guarded(self, number: Select[int], *chosen: ColumnElement[bool]) -> JobLease | None:
        """The lease of a job that is `chosen`, once that job is locked; it may have changed until then.

        number: the job's.
        """
        found = self._session.scalar(number)
        if found is None:
            return None
        self._session.scalars(locked(select(Job).where(Job.number == found))).one()
        statement = select(JobLease).where(JobLease.job_number == found, *chosen).order_by(JobLease.number.desc())
        return self._session.scalar(statement.limit(1).execution_options(populate_existing=True))

    def _state(self, lease: JobLease) -> JobState:
        return self._session.get_one(Job, lease.job_number).state

    def latest_of_job(self, job_number: int) -> JobLease | None:
        """The lease that a job was given last."""
        statement = select(JobLease).where(JobLease.job_number == job_number).order_by(JobLease.number.desc())
        return self._session.scalar(statement.limit(1))

    def waiting_job(
        self, tenant: str, device_id: str, datasets: Sequence[str], memory_bytes: int | None, now: datetime
    ) -> Job | None:
        """The oldest job that this device may train and can hold; locked until the transaction ends."""
        statement = self._waiting(tenant, device_id, datasets, memory_bytes, now)
        return self._session.scalar(locked(statement, skip=True))

    def _waiting(
        self, tenant: str, device_id: str, datasets: Sequence[str], memory_bytes: int | None, now: datetime
    ) -> Select[Job]:
        return (
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
        waiting = self._waiting(tenant, device_id, datasets, memory_bytes, now)
        return self._session.scalar(waiting) is not None or self.overdue(now)

    def overdue(self, now: datetime) -> bool:
        """Whether a live lease's time is over."""
        return self._session.scalar(select(JobLease.number).where(*_over(now)).limit(1)) is not None

    def take_overdue(self, now: datetime) -> Sequence[JobLease]:
        """Live leases whose time is over, with their jobs locked; not those that somebody else is busy with."""
        late = select(Job).join(JobLease, JobLease.job_number == Job.number).where(*_over(now))
        jobs = self._session.scalars(locked(late.order_by(Job.number), of=Job, skip=True)).all()
        return self._live_of([job.number for job in jobs], *_over(now))

    def take_live_of_device(self, device_id: str) -> Sequence[JobLease]:
        """All live leases of a device, with their jobs locked."""
        live = JobLease.device_id == device_id, JobLease.ending.is_(None)
        held = select(Job).join(JobLease, JobLease.job_number == Job.number).where(*live)
        jobs = self._session.scalars(locked(held.order_by(Job.number), of=Job)).all()
        return self._live_of([job.number for job in jobs], *live)

    def _live_of(self, numbers: Sequence[int], *chosen: ColumnElement[bool]) -> Sequence[JobLease]:
        """The leases of locked jobs, read after they were locked."""
        if not numbers:
            return []
        statement = select(JobLease).where(JobLease.job_number.in_(numbers), *chosen).order_by(JobLease.number)
        return self._session.scalars(statement.execution_options(populate_existing=True)).all()

    def cancel(self, job_number: int, now: datetime) -> None:
        """Ends the live lease of a cancelled job, if there is one."""
        self._session.execute(
            update(JobLease)
            .where(JobLease.job_number == job_number, JobLease.ending.is_(None))
            .values(ending=Ending.CANCELLED, ended_at=now)
        )


def _over(now: datetime) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return JobLease.ending.is_(None), JobLease.expires_at < now
