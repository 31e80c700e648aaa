"""The tables of conversions and their files."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, word
from server.storage.store import FileColumn, FileReferences
from shared.job import JobError
from shared.protocol import ConversionState, MergedForm

__all__ = ["CONVERT", "Conversion", "ConversionFile", "ConversionState"]
CONVERT = "conversion"  # the kind of task, whose subject is the conversion's id


class Conversion(Numbered, Table):
    """A version's merged model in one form. A conversion task (`server.tasks`) makes it."""

    __tablename__ = "conversions"
    __table_args__ = (UniqueConstraint("version_number", "form"),)

    id: Mapped[str] = mapped_column(String(64), unique=True)
    version_number: Mapped[int] = mapped_column(ForeignKey("adapter_versions.number", ondelete="CASCADE"))
    form: Mapped[MergedForm] = mapped_column(word(MergedForm))
    state: Mapped[ConversionState] = mapped_column(word(ConversionState), index=True)
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(Moment)  # time of the latest request that started it
    started_at: Mapped[datetime | None] = mapped_column(Moment)  # the latest attempt
    ready_at: Mapped[datetime | None] = mapped_column(Moment)


class ConversionFile(Table):
    """A file of a conversion that is ready."""

    __tablename__ = "conversion_files"

    conversion_number: Mapped[int] = mapped_column(
        ForeignKey("conversions.number", ondelete="CASCADE"), primary_key=True
    )
    path: Mapped[str] = mapped_column(String(100), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    sha256: Mapped[str] = mapped_column(String(64), index=True)


FILES = FileReferences(columns=(FileColumn(ConversionFile.sha256),))
