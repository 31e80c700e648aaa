"""The tables of programs and their files."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import ForeignKey, String, false
from sqlalchemy.orm import Mapped, mapped_column

from server.database.columns import Document, Moment, Numbered, Table, word
from server.storage.references import FileColumn, FileReferences
from shared.job import JobError, Progress
from shared.program import SignedManifest
from shared.recipe import Recipe

COMPILE = "compile"  # the kind of task, whose subject is the recipe's id


class ProgramState(StrEnum):
    """The state of a program."""

    PENDING = "pending"  # waits for a worker while a job requests it
    COMPILING = "compiling"
    READY = "ready"
    FAILED = "failed"


class Program(Numbered, Table):
    """The program of one recipe. A compile task (`server.tasks`) compiles it."""

    __tablename__ = "programs"

    recipe_id: Mapped[str] = mapped_column(String(64), unique=True)
    recipe: Mapped[Recipe] = mapped_column(Document(Recipe))
    base_number: Mapped[int] = mapped_column(ForeignKey("bases.number"))
    state: Mapped[ProgramState] = mapped_column(word(ProgramState), index=True)
    signed: Mapped[SignedManifest | None] = mapped_column(Document(SignedManifest))
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(Moment)
    started_at: Mapped[datetime | None] = mapped_column(Moment)  # the latest attempt
    ready_at: Mapped[datetime | None] = mapped_column(Moment)
    progress: Mapped[Progress | None] = mapped_column(Document(Progress))  # of the running compilation
    recompiling: Mapped[bool] = mapped_column(default=False, server_default=false())  # requested by an operator


class ProgramBlob(Table):
    """A file of a compiled program. Programs share weights and tokenizer.

    After a recompilation the previous version keeps its files, because devices still train with it.
    """

    __tablename__ = "program_files"

    recipe_id: Mapped[str] = mapped_column(ForeignKey("programs.recipe_id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    role: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    sha256: Mapped[str] = mapped_column(String(64), index=True)


FILES = FileReferences(columns=(FileColumn(ProgramBlob.sha256),))
