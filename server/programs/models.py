"""The tables of programs, their files, and the workers that compile them."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, ForeignKey, String, false
from sqlalchemy.orm import Mapped, mapped_column

from server.db.columns import Document, Moment, Numbered, Table, word
from shared.job import JobError, Progress
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
    started_at: Mapped[datetime | None] = mapped_column(Moment)  # the latest try
    ready_at: Mapped[datetime | None] = mapped_column(Moment)
    next_attempt_at: Mapped[datetime | None] = mapped_column(Moment)  # not before; None: at once
    memory_bytes: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")  # that a compile may take
    progress: Mapped[Progress | None] = mapped_column(Document(Progress))  # of the compile under way
    anew: Mapped[bool] = mapped_column(default=False, server_default=false())  # an operator wants it compiled again


class ProgramBlob(Table):
    """A file of a compiled program; weights and tokenizer are shared by many.

    Of a program that was compiled anew the version before keeps its files: devices train with it.
    """

    __tablename__ = "program_files"

    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    sha256: Mapped[str] = mapped_column(String(64), index=True)


class Worker(Table):
    """A worker process and the most memory that it and its compilers took, bytes."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pid: Mapped[int] = mapped_column()
    host: Mapped[str] = mapped_column(String(255), default="", server_default="")
    pid_space: Mapped[str] = mapped_column(String(255), default="", server_default="")  # where `pid` means something
    started_at: Mapped[datetime] = mapped_column(Moment)
    seen_at: Mapped[datetime] = mapped_column(Moment)
    peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)
    compiler_peak_rss_bytes: Mapped[int] = mapped_column(BigInteger, default=0)


class WorkerHost(Table):
    """A machine that compiles, and how much memory its compiles may take together, bytes."""

    __tablename__ = "worker_hosts"

    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    memory_bytes: Mapped[int] = mapped_column(BigInteger)
    limited: Mapped[bool] = mapped_column()  # an operator said so; otherwise a single compile may take more
    seen_at: Mapped[datetime] = mapped_column(Moment)


class CompileTurn(Table):
    """When a tenant's turn to have a program compiled came last: the number of the turn, counted over all tenants."""

    __tablename__ = "compile_turns"

    tenant: Mapped[str] = mapped_column(String(96), primary_key=True)
    turn: Mapped[int] = mapped_column(BigInteger, index=True)
