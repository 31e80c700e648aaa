"""The tables of leases and of declined recipes, and all their SQL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Select,
    String,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    text,
    true,
    update,
)
from sqlalchemy.orm import Mapped, Session, load_only, mapped_column

from server.database.columns import Numbered, Table, UtcTime, text_enum
from server.database.database import Repository, insert_or, locked, read_columns
from server.identity.devices.repository import Device
from server.jobs.repository import Job
from server.programs.service import ProgramBlob
from server.storage.store import FileColumn
from shared.capabilities import Labels
from shared.job import JobState

DECLINE_LASTS = timedelta(hours=1)  # for a device that does not report its memory


class Ending(StrEnum):
    """Why a lease ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DECLINED = "declined"  # the device has too little memory
    REVOKED = "revoked"  # the device was revoked
    UNBOUND = "unbound"  # the job's user was unbound from the device


_LIVE = text("ending IS NULL")


class JobLease(Numbered, Table):
    """A job that one device has for a limited time. A unique index allows at most one live lease of a job."""

    __tablename__ = "leases"
    __table_args__ = (
        Index("ix_leases_live", "job_number", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("ix_leases_device", "device_id", "ending", "number", "job_number"),
        Index("ix_leases_job", "job_number", "number"),
        # `ending` is NULL in all its rows; without the column SQLite would read the table to check this.
        Index(
            "ix_leases_expiry",
            "expires_at",
            "number",
            "job_number",
            "ending",
            sqlite_where=_LIVE,
            postgresql_where=_LIVE,
        ),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    expires_at: Mapped[datetime] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ending: Mapped[Ending | None] = mapped_column(text_enum(Ending))
    upload_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    upload_size: Mapped[int | None] = mapped_column(BigInteger)
    upload_norm: Mapped[float | None] = mapped_column(Float)  # Euclidean norm of an update in a round
    trajectory_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    trajectory_size: Mapped[int | None] = mapped_column(BigInteger)
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # memory that the device reported as available
    seconds: Mapped[float | None] = mapped_column(Float)  # duration without a heartbeat; None: the server's setting


class MemoryDecline(Table):
    """The latest report of a device that its memory is too small for a recipe's program; sizes in bytes.

    enough_bytes: the available memory that the device must report before it is offered that recipe again.
    """

    __tablename__ = "declines"

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), primary_key=True)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"))
    needed_bytes: Mapped[int] = mapped_column(BigInteger)
    available_bytes: Mapped[int] = mapped_column(BigInteger)
    enough_bytes: Mapped[int] = mapped_column(BigInteger)
    declined_at: Mapped[datetime] = mapped_column(UtcTime)


class PurgedLeases(Table):
    """How many leases were removed, by ending; by `REASSIGNED`: those of jobs that had an earlier lease."""

    __tablename__ = "purged_leases"

    ending: Mapped[str] = mapped_column(String(16), primary_key=True)
    leases: Mapped[int] = mapped_column(BigInteger)


REASSIGNED = "reassigned"


# An expired lease may be revived while its job waits; its upload is then valid again.
_MAY_COMPLETE = or_(JobLease.ending.is_(None), (JobLease.ending == Ending.EXPIRED) & (Job.state == JobState.READY))
_JOB = Job, Job.number == JobLease.job_number
FILES = tuple(
    FileColumn(column, _MAY_COMPLETE, join=_JOB, temporary=True)
    for column in (JobLease.upload_sha256, JobLease.trajectory_sha256)
)


@dataclass(frozen=True)
class DeviceStatus:
    """The status of a device. has_declined: any recipe at any time. had_lease: it has a lease or an expired one."""

    labels: Labels
    revoked_at: datetime | None
    cooldown_until: datetime | None
    has_declined: bool
    had_lease: bool


# Built once, because every request for a job executes it and building the statement costs more than executing it.
_LOCK = (
    select(Device.number)
    .where(Device.id.in_(bindparam("device_ids", expanding=True)))
    .order_by(Device.id)
    .with_for_update(key_share=True)
)
_STATUSES = select(
    Device.id,
    Device.labels,
    Device.revoked_at,
    Device.cooldown_until,
    exists(select(MemoryDecline.recipe_id).where(MemoryDecline.device_id == Device.id)).label("has_declined"),
    or_(
        exists(select(JobLease.number).where(JobLease.device_id == Device.id, JobLease.ending.is_(None))),
        exists(select(JobLease.number).where(JobLease.device_id == Device.id, JobLease.ending == Ending.EXPIRED)),
    ).label("had_lease"),
).where(Device.id.in_(bindparam("device_ids", expanding=True)))
_OVERDUE = select(JobLease.number).where(JobLease.ending.is_(None), JobLease.expires_at < bindparam("now")).limit(1)


LeasedJob = tuple[JobLease, Job]


class LeaseRepository(Repository):
    """Leases in one session."""

    def with_jobs(self, lease_ids: Collection[str], whole: bool) -> list[LeasedJob]:
        """Returns leases and their jobs, locked until the transaction ends.

        whole: with all columns of the jobs. Otherwise only those that a heartbeat needs, and others are loaded on
        access, because requests, tasks and recipes are expensive to parse.
        """
        numbers = select(JobLease.job_number).where(JobLease.id.in_(lease_ids))
        of_progress = Job.events, Job.max_events, Job.progress, Job.hides_figures
        few = load_only(Job.state, Job.updated_at, Job.lane_number, *of_progress)
        statement = select(Job).where(Job.number.in_(numbers)).order_by(Job.number)
        statement = statement if whole else statement.options(few)
        jobs = {job.number: job for job in self._session.scalars(locked(statement))}
        leases = self._session.scalars(select(JobLease).where(JobLease.id.in_(lease_ids)))
        return [(lease, jobs[lease.job_number]) for lease in leases]

    def of_device(self, device_id: str, lease_id: str) -> LeasedJob | None:
        """Returns a lease of that device, live or ended, and its job, which is locked."""
        conditions = JobLease.device_id == device_id, JobLease.id == lease_id
        return self._guarded(select(JobLease.job_number).where(*conditions), *conditions)

    def get_unlocked(self, device_id: str, lease_id: str) -> JobLease | None:
        """Returns a lease of that device, live or ended, without locking anything."""
        return self._one(JobLease, JobLease.device_id == device_id, JobLease.id == lease_id)

    def live(self, device_id: str, datasets: Collection[str]) -> LeasedJob | None:
        """Returns the device's live lease on a job whose data set it still has, and the job, which is locked."""
        return self._guarded(_of_live(device_id, datasets), *_live(device_id))

    def lapsed(self, device_id: str, datasets: Collection[str]) -> LeasedJob | None:
        """Returns the device's latest expired lease whose job waits and was not leased again, and the locked job."""
        leased = self._guarded(_of_lapsed(device_id, datasets), *_lapsed(device_id))
        return leased if leased is not None and leased[1].state is JobState.READY else None

    def lock_devices(self, device_ids: Collection[str]) -> None:
        """Locks devices until the transaction ends, in the order of their ids."""
        # A separate statement, because one that waits for a lock sees other tables as they were before the wait.
        self._session.execute(_LOCK, {"device_ids": list(device_ids)})

    def statuses(self, device_ids: Collection[str]) -> dict[str, DeviceStatus]:
        """Returns the status of each device, by its id."""
        rows = read_columns(self._session, _STATUSES, {"device_ids": list(device_ids)})
        return {
            row.id: DeviceStatus(row.labels.root, row.revoked_at, row.cooldown_until, row.has_declined, row.had_lease)
            for row in rows
        }

    def may_hold(self, device_id: str, datasets: Collection[str]) -> bool:
        """Returns whether the device has a lease or an expired one that may be revived, without locking anything."""
        numbers = _of_live(device_id, datasets), _of_lapsed(device_id, datasets)
        return any(self._session.scalar(number) is not None for number in numbers)

    def _guarded(self, number: Select[int], *conditions: ColumnElement[bool]) -> LeasedJob | None:
        """Locks a job and returns its lease that matches `conditions`. The lease may change before the lock is held.

        number: the query for the job's number.
        """
        job = self._session.scalar(locked(select(Job).where(Job.number == number.scalar_subquery())))
        if job is None:
            return None
        statement = (
            select(JobLease).where(JobLease.job_number == job.number, *conditions).order_by(JobLease.number.desc())
        )
        lease = self._session.scalar(statement.limit(1).execution_options(populate_existing=True))
        return None if lease is None else (lease, job)

    def latest_of_job(self, job_number: int) -> JobLease | None:
        """Returns the latest lease of a job."""
        statement = select(JobLease).where(JobLease.job_number == job_number).order_by(JobLease.number.desc())
        return self._session.scalar(statement.limit(1))

    def declined(self, device_id: str, memory_bytes: int | None, now: datetime) -> frozenset[str]:
        """Returns the recipes that a device declined and still lacks memory for. memory_bytes: its available memory."""
        if memory_bytes is None:
            applies = MemoryDecline.declined_at > now - DECLINE_LASTS
        else:
            applies = MemoryDecline.enough_bytes > memory_bytes
        return frozenset(
            self._session.scalars(select(MemoryDecline.recipe_id).where(MemoryDecline.device_id == device_id, applies))
        )

    def who_declined(self, recipe_id: str, now: datetime) -> frozenset[str]:
        """Returns the devices that declined a recipe recently."""
        declined = select(MemoryDecline.device_id).where(
            MemoryDecline.recipe_id == recipe_id, MemoryDecline.declined_at > now - DECLINE_LASTS
        )
        return frozenset(self._session.scalars(declined))

    def holders(self, device_ids: Sequence[str]) -> frozenset[str]:
        """Returns those of the devices that have a live lease."""
        live = select(JobLease.device_id).where(JobLease.device_id.in_(device_ids), JobLease.ending.is_(None))
        return frozenset(self._session.scalars(live))

    def jobs_of(self, device_ids: Sequence[str]) -> dict[str, Job]:
        """Returns the job that each of the devices trains, by the device's id."""
        live = select(JobLease.device_id, JobLease.job_number)
        leases = self._session.execute(live.where(JobLease.device_id.in_(device_ids), JobLease.ending.is_(None))).all()
        numbers = [number for _, number in leases]
        jobs = {job.number: job for job in self._session.scalars(select(Job).where(Job.number.in_(numbers)))}
        return {device_id: jobs[number] for device_id, number in leases}

    def add_decline(self, decline: MemoryDecline) -> None:
        """Stores a decline in place of the device's earlier one of the same recipe."""
        self._session.merge(decline)

    def expired(self, job_number: int) -> int:
        """Returns how many leases of a job have expired."""
        return self._count(JobLease.job_number == job_number, JobLease.ending == Ending.EXPIRED)

    def overdue(self, now: datetime) -> bool:
        """Returns whether any live lease is overdue."""
        return read_columns(self._session, _OVERDUE, {"now": now}).first() is not None

    def take_overdue(self, now: datetime) -> list[LeasedJob]:
        """Returns overdue live leases and their jobs, locked, and skips jobs that another transaction has locked."""
        late = select(JobLease.job_number).where(*_overdue(now)).order_by(JobLease.expires_at)
        return self._take(self._session.scalars(late).all(), *_overdue(now), skip=True)

    def take_live_of_device(self, device_id: str) -> list[LeasedJob]:
        """Returns all live leases of a device, and their jobs, which are locked."""
        job_numbers = select(JobLease.job_number).where(*_live(device_id)).order_by(JobLease.number)
        return self._take(self._session.scalars(job_numbers).all(), *_live(device_id))

    def take_of_user(self, device_id: str, user: str) -> list[LeasedJob]:
        """Returns a device's leases that are live or may be revived, and their jobs, which are locked.

        Only those on jobs of a user, or on jobs that start from the user's adapter.
        """
        usable = JobLease.device_id == device_id, or_(JobLease.ending.is_(None), JobLease.ending == Ending.EXPIRED)
        whose = or_(Job.user == user, Job.start_user == user)
        job_numbers = select(JobLease.job_number).join(Job, Job.number == JobLease.job_number).where(*usable, whose)
        open_jobs = job_numbers.where(Job.state.in_((JobState.TRAINING, JobState.READY))).distinct()
        return self._take(self._session.scalars(open_jobs).all(), *usable)

    def _take(self, numbers: Sequence[int], *conditions: ColumnElement[bool], skip: bool = False) -> list[LeasedJob]:
        """Locks jobs and returns their leases that match `conditions`. skip: skips jobs that others have locked."""
        if not numbers:
            return []
        statement = select(Job).where(Job.number.in_(numbers)).order_by(Job.number)
        jobs = {job.number: job for job in self._session.scalars(locked(statement, skip=skip))}
        matching = select(JobLease).where(JobLease.job_number.in_(jobs), *conditions).order_by(JobLease.number)
        leases = self._session.scalars(matching.execution_options(populate_existing=True))
        return [(lease, jobs[lease.job_number]) for lease in leases]

    def counts(self) -> tuple[dict[Ending | None, int], int]:
        """Returns how many leases have each ending, and how many are of jobs that had an earlier lease.

        Leases that were removed count.
        """
        endings, reassigned = self._counts(true())
        purged = {row.ending: row.leases for row in self._session.scalars(select(PurgedLeases))}
        reassigned += purged.pop(REASSIGNED, 0)
        endings.update({Ending(ending): count for ending, count in purged.items()})
        return endings, reassigned

    def purge(self, job_numbers: Sequence[int]) -> None:
        """Removes the leases of jobs that have ended, and counts them."""
        old = JobLease.job_number.in_(job_numbers)
        endings, reassigned = self._counts(old)
        counts = {str(ending): count for ending, count in endings.items()} | {REASSIGNED: reassigned}
        for ending, count in sorted(counts.items()):
            statement = insert_or(self._session, PurgedLeases).values(ending=ending, leases=count)
            more = {"leases": PurgedLeases.leases + count}
            self._session.execute(statement.on_conflict_do_update(index_elements=[PurgedLeases.ending], set_=more))
        self._session.execute(delete(JobLease).where(old), execution_options={"synchronize_session": False})

    def _counts(self, condition: ColumnElement[bool]) -> tuple[Counter[Ending | None], int]:
        by_ending = select(JobLease.ending, func.count()).where(condition).group_by(JobLease.ending)
        totals = select(func.count(), func.count(JobLease.job_number.distinct())).where(condition)
        leases, jobs = self._session.execute(totals).one()
        return Counter({ending: count for ending, count in self._session.execute(by_ending)}), leases - jobs  # noqa: C416

    def cancel(self, job_number: int, now: datetime) -> None:
        """Ends the live lease of a cancelled job, if there is one."""
        self._session.execute(
            update(JobLease)
            .where(JobLease.job_number == job_number, JobLease.ending.is_(None))
            .values(ending=Ending.CANCELLED, ended_at=now)
        )


def _overdue(now: datetime) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return JobLease.ending.is_(None), JobLease.expires_at < now


def _live(device_id: str) -> tuple[ColumnElement[bool], ...]:
    return JobLease.device_id == device_id, JobLease.ending.is_(None)


def _of_live(device_id: str, datasets: Collection[str]) -> Select[int]:
    """Returns the query for the number of the job that a device has, if the device still has its data set."""
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
    """Returns the query for the number of the job that a device had last, if it waits and was not leased again."""
    number = select(JobLease.job_number).join(Job, Job.number == JobLease.job_number)
    conditions = *_lapsed(device_id), Job.state == JobState.READY, Job.dataset.in_(datasets)
    return number.where(*conditions).order_by(JobLease.number.desc()).limit(1)


def file_of_device(session: Session, device_id: str, sha256: str) -> ProgramBlob | None:
    """Returns a file of a program whose job is or was leased to the device."""
    statement = (
        select(ProgramBlob)
        .join(Job, Job.recipe_id == ProgramBlob.recipe_id)
        .join(JobLease, JobLease.job_number == Job.number)
        .where(ProgramBlob.sha256 == sha256, JobLease.device_id == device_id)
    )
    return session.scalar(statement.limit(1))
