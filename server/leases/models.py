"""The tables of leases, and of what devices declined."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Float, ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table, word


class Ending(StrEnum):
    """Why a lease ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    DECLINED = "declined"  # the device has too little memory
    REVOKED = "revoked"  # the device was


_LIVE = text("ending IS NULL")


class JobLease(Numbered, Table):
    """A job in one device's hands. Of one job's leases at most one is live, which the database itself holds."""

    __tablename__ = "leases"
    __table_args__ = (
        Index("ix_leases_live", "job_number", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("ix_leases_device", "device_id", "ending", "number", "job_number"),
        Index("ix_leases_job", "job_number", "number"),
        # With what is known of all its rows anyway, or SQLite would look that up.
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
    upload_norm: Mapped[float | None] = mapped_column(Float)  # of an update in a round: how far B moved
    trajectory_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    trajectory_size: Mapped[int | None] = mapped_column(BigInteger)
    memory_bytes: Mapped[int | None] = mapped_column(BigInteger)  # what the device said it can spare
    seconds: Mapped[float | None] = mapped_column(Float)  # how long it lasts; None: as the server is set


class MemoryDecline(Table):
    """That a device could not hold a recipe's program, when it last said so; bytes.

    enough_bytes: what it must say it can spare before it is offered that recipe again.
    """

    __tablename__ = "declines"

    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"), primary_key=True)
    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), primary_key=True)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"))
    needed_bytes: Mapped[int] = mapped_column(BigInteger)
    available_bytes: Mapped[int] = mapped_column(BigInteger)
    enough_bytes: Mapped[int] = mapped_column(BigInteger)
    declined_at: Mapped[datetime] = mapped_column(Moment)
