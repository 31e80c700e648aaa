"""The tables of conversions that workers make, and of the files that came of them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError
from shared.protocol import ConversionState

__all__ = ["Conversion", "ConversionFile", "ConversionState"]


class Conversion(Numbered, Table):
    """A version's merged model. While it is made it is one worker's, until `lease_expires_at`."""

    __tablename__ = "conversions"

    id: Mapped[str] = mapped_column(String(64), unique=True)
    version_number: Mapped[int] = mapped_column(ForeignKey("adapter_versions.number", ondelete="CASCADE"), unique=True)
    state: Mapped[ConversionState] = mapped_column(word(ConversionState), index=True)
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"))
    lease_expires_at: Mapped[datetime | None] = mapped_column(Moment)
    attempts: Mapped[int] = mapped_column(default=0)
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    memory_bytes: Mapped[int] = mapped_column(BigInteger)  # that making it may take
    created_at: Mapped[datetime] = mapped_column(Moment)  # asked for, the latest time that it began anew
    started_at: Mapped[datetime | None] = mapped_column(Moment)  # the latest try
    ready_at: Mapped[datetime | None] = mapped_column(Moment)
    next_attempt_at: Mapped[datetime | None] = mapped_column(Moment)  # not before; None: at once


class ConversionFile(Table):
    """A file of a conversion that is ready."""

    __tablename__ = "conversion_files"

    conversion_number: Mapped[int] = mapped_column(
        ForeignKey("conversions.number", ondelete="CASCADE"), primary_key=True
    )
    path: Mapped[str] = mapped_column(String(100), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64), index=True)
