"""The tables of leases and of declined recipes."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Float, ForeignKey, Index, String, or_, text
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Moment, Numbered, Table, word
from server.jobs.models import Job
from server.storage.references import FileColumn, FileReferences
from shared.job import JobState


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
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    ending: Mapped[Ending | None] = mapped_column(word(Ending))
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
    declined_at: Mapped[datetime] = mapped_column(Moment)


# An expired lease may be revived while its job waits; its upload is then valid again.
_MAY_COMPLETE = or_(JobLease.ending.is_(None), (JobLease.ending == Ending.EXPIRED) & (Job.state == JobState.READY))
_JOB = Job, Job.number == JobLease.job_number
FILES = FileReferences(
    columns=tuple(
        FileColumn(column, _MAY_COMPLETE, join=_JOB, temporary=True)
        for column in (JobLease.upload_sha256, JobLease.trajectory_sha256)
    )
)
