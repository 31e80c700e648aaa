"""All SQL about leases, and about what devices declined."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, Select, bindparam, exists, func, or_, select, update
from sqlalchemy.orm import Session, load_only

from server.db.locking import locked
from server.devices.models import Device
from server.jobs.models import Job
from server.leases.models import Ending, JobLease, MemoryDecline
from shared.capabilities import Labels
from shared.job import JobState

DECLINE_LASTS = timedelta(hours=1)  # for a device that does not say what memory it has by now


@dataclass(frozen=True)
class Standing:
    """How a device stands. has_declined: some recipe, some time. had_lease: has one, or had one that ran out."""

    labels: Labels
    revoked_at: datetime | None
    rests_until: datetime | None
    has_declined: bool
    had_lease: bool


# Built once, since every request for a job asks it: building a statement costs more than running it.
_LOCK = select(Device.number).where(Device.id == bindparam("device_id")).with_for_update(key_share=True)
_STANDING = select(
    Device.labels,
    Device.revoked_at,
    Device.rests_until,
    exists(select(MemoryDecline.recipe_id).where(MemoryDecline.device_id == Device.id)).label("has_declined"),
    or_(
        exists(select(JobLease.number).where(JobLease.device_id == Device.id, JobLease.ending.is_(None))),
        exists(select(JobLease.number).where(JobLease.device_id == Device.id, JobLease.ending == Ending.EXPIRED)),
    ).label("had_lease"),
).where(Device.id == bindparam("device_id"))

_OVERDUE = select(JobLease.number).where(JobLease.ending.is_(None), JobLease.expires_at < bindparam("now")).limit(1)


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
        numbers = select(JobLease.job_number).where(JobLease.id.in_(lease_ids))
        few = load_only(Job.state, Job.events, Job.progress, Job.updated_at, Job.lane_number)
        statement = select(Job).where(Job.number.in_(numbers)).order_by(Job.number).options(few)
        jobs = {job.number: job for job in self._session.scalars(locked(statement))}
        leases = self._session.scalars(select(JobLease).where(JobLease.id.in_(lease_ids)))
        return [(lease, jobs[lease.job_number]) for lease in leases]

    def of_device(self, device_id: str, lease_id: str) -> JobLease | None:
        """A lease of that device, live or ended, with its job locked."""
        chosen = JobLease.device_id == device_id, JobLease.id == lease_id
        return self._guarded(select(JobLease.job_number).where(*chosen), *chosen)

    def seen(self, device_id: str, lease_id: str) -> JobLease | None:
        """The same, with nothing locked."""
        return self._session.scalar(select(JobLease).where(JobLease.device_id == device_id, JobLease.id == lease_id))

    def live(self, device_id: str, datasets: Collection[str]) -> JobLease | None:
        """The device's live lease on a job whose data set it still holds, with its job locked."""
        return self._guarded(_of_live(device_id, datasets), *_live(device_id))

    def lapsed(self, device_id: str, datasets: Collection[str]) -> JobLease | None:
        """The device's latest lease that expired and whose job waits, given to nobody since; with its job locked."""
        lease = self._guarded(_of_lapsed(device_id, datasets), *_lapsed(device_id))
        return lease if lease is not None and self._state(lease) is JobState.READY else None

    def standing(self, device_id: str, lock: bool = False) -> Standing:
        """How a device that is known to exist stands. lock: its row, until the transaction ends."""
        if lock:
            # By itself: what a statement finds in other tables is as it was when the statement began to wait.
            self._session.execute(_LOCK, {"device_id": device_id})
        row = self._session.execute(_STANDING, {"device_id": device_id}).one()
        return Standing(row.labels.root, row.revoked_at, row.rests_until, row.has_declined, row.had_lease)

    def may_hold(self, device_id: str, datasets: Collection[str]) -> bool:
        """Whether the device has a lease, or had one that it may have again; locks nothing."""
        numbers = _of_live(device_id, datasets), _of_lapsed(device_id, datasets)
        return any(self._session.scalar(number) is not None for number in numbers)

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

    def declined(self, device_id: str, memory_bytes: int | None, now: datetime) -> frozenset[str]:
        """Recipes that a device declined and has not more memory for since; memory_bytes: that it can spare."""
        if memory_bytes is None:
            holds = MemoryDecline.declined_at > now - DECLINE_LASTS
        else:
            holds = MemoryDecline.enough_bytes > memory_bytes
        return frozenset(
            self._session.scalars(select(MemoryDecline.recipe_id).where(MemoryDecline.device_id == device_id, holds))
        )

    def who_declined(self, recipe_id: str, now: datetime) -> frozenset[str]:
        """Devices that declined a recipe and did not say since that they have more memory."""
        declined = select(MemoryDecline.device_id).where(
            MemoryDecline.recipe_id == recipe_id, MemoryDecline.declined_at > now - DECLINE_LASTS
        )
        return frozenset(self._session.scalars(declined))

    def holders(self, device_ids: Sequence[str]) -> frozenset[str]:
        """Those of the devices that have a job."""
        live = select(JobLease.device_id).where(JobLease.device_id.in_(device_ids), JobLease.ending.is_(None))
        return frozenset(self._session.scalars(live))

    def note_decline(self, decline: MemoryDecline) -> None:
        """Stores what a device declined, in place of what it said of that recipe before."""
        self._session.merge(decline)

    def expired(self, job_number: int) -> int:
        """How many leases of a job ran out for good so far."""
        statement = select(func.count()).where(JobLease.job_number == job_number, JobLease.ending == Ending.EXPIRED)
        return self._session.scalars(statement).one()

    def overdue(self, now: datetime) -> bool:
        """Whether a live lease's time is over."""
        return self._session.scalar(_OVERDUE, {"now": now}) is not None

    def take_overdue(self, now: datetime) -> Sequence[JobLease]:
        """Live leases whose time is over, with their jobs locked; not those that somebody else is busy with."""
        late = select(JobLease.job_number).where(*_over(now)).order_by(JobLease.expires_at)
        return self._take(self._session.scalars(late).all(), *_over(now), skip=True)

    def take_live_of_device(self, device_id: str) -> Sequence[JobLease]:
        """All live leases of a device, with their jobs locked."""
        held = select(JobLease.job_number).where(*_live(device_id)).order_by(JobLease.number)
        return self._take(self._session.scalars(held).all(), *_live(device_id))

    def _take(self, numbers: Sequence[int], *chosen: ColumnElement[bool], skip: bool = False) -> Sequence[JobLease]:
        """The leases of jobs that are `chosen` once these are locked; skip: but those whose job others have locked."""
        if not numbers:
            return []
        jobs = select(Job).where(Job.number.in_(numbers)).order_by(Job.number)
        taken = [job.number for job in self._session.scalars(locked(jobs, skip=skip))]
        statement = select(JobLease).where(JobLease.job_number.in_(taken), *chosen).order_by(JobLease.number)
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


def _live(device_id: str) -> tuple[ColumnElement[bool], ...]:
    return JobLease.device_id == device_id, JobLease.ending.is_(None)


def _of_live(device_id: str, datasets: Collection[str]) -> Select[int]:
    """The number of a job that a device has, if it still holds its data set."""
    number = select(JobLease.job_number).join(Job, Job.number == JobLease.job_number)
    return number.where(*_live(device_id), Job.dataset.in_(datasets)).limit(1)


def _lapsed(device_id: str) -> tuple[ColumnElement[bool], ...]:
    newer = JobLease.__table__.alias("newer")
    given_since = (
        select(newer.c.number)
        .where(newer.c.job_number == JobLease.job_number, newer.c.number > JobLease.number)
        .correlate(JobLease)
        .exists()
    )
    return JobLease.device_id == device_id, JobLease.ending == Ending.EXPIRED, ~given_since


def _of_lapsed(device_id: str, datasets: Collection[str]) -> Select[int]:
    """The number of the job that a device had last and that waits, given to nobody since."""
    number = select(JobLease.job_number).join(Job, Job.number == JobLease.job_number)
    chosen = *_lapsed(device_id), Job.state == JobState.READY, Job.dataset.in_(datasets)
    return number.where(*chosen).order_by(JobLease.number.desc()).limit(1)
