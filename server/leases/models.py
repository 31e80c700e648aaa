"""The table of leases."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Moment, Numbered, Table, word


class Ending(StrEnum):
    """Why a lease ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    RELEASED = "released"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


_LIVE = text("ending IS NULL")


class JobLease(Numbered, Table):
    """A job in one device's hands. Of one job's leases at most one is live, which the database itself holds."""

    __tablename__ = "leases"
    __table_args__ = (
        Index("ix_leases_live", "job_number", unique=True, sqlite_where=_LIVE, postgresql_where=_LIVE),
        Index("ix_leases_device", "device_id", "ending"),
    )

    id: Mapped[str] = mapped_column(String(64), unique=True)
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"))
    device_id: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    created_at: Mapped[datetime] = mapped_column(Moment)
    expires_at: Mapped[datetime] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    ending: Mapped[Ending | None] = mapped_column(word(Ending))
    upload_sha256: Mapped[str | None] = mapped_column(String(64))
    upload_size: Mapped[int | None] = mapped_column(BigInteger)
