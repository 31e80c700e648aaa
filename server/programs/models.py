"""The tables of programs, their files, and the workers that compile them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError
from shared.program import SignedManifest
from shared.recipe import Recipe


class ProgramState(StrEnum):
    """Where a program stands."""

    PENDING = "pending"  # waits for a worker, if a job wants it
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


class Program(Numbered, Table):
    """What one recipe compiles to. While it compiles it is one worker's, until `lease_expires_at`."""

    __tablename__ = "programs"

    recipe_id: Mapped[str] = mapped_column(String(64), unique=True)
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    base_number: Mapped[int] = mapped_column(ForeignKey("bases.number"))
    state: Mapped[ProgramState] = mapped_column(word(ProgramState), index=True)
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"))
    lease_expires_at: Mapped[datetime | None] = mapped_column(Moment)
    attempts: Mapped[int] = mapped_column(default=0)
    signed: Mapped[SignedManifest | None] = mapped_column(Document(SignedManifest))
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(Moment)
    ready_at: Mapped[datetime | None] = mapped_column(Moment)


class ProgramBlob(Table):
    """A file of a ready program; weights and tokenizer are shared by many."""

    __tablename__ = "program_files"

    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), primary_key=True)
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    sha256: Mapped[str] = mapped_column(String(64), index=True)


class Worker(Table):
    """A worker process and the most memory that it and its compilers took, bytes."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pid: Mapped[int] = mapped_column()
    started_at: Mapped[datetime] = mapped_column(Moment)
    seen_at: Mapped[datetime] = mapped_column(Moment)
    peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    compiler_peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
