"""Programs: their tables and SQL, their state machine, requesting them, and signing them again after a key rotation.

Jobs that wait for a program follow its state. The ports by which programs reach jobs and the registry, which lie above
them, are declared here; `server.wiring` connects them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import ForeignKey, String, Text, bindparam, delete, false, func, select, type_coerce
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.catalog.bases import BaseModelEntry
from server.database.columns import Document, Numbered, Table, UtcTime, text_enum, utc_now
from server.database.database import Repository, add_if_absent, change_state, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.ports import Port
from server.storage.store import FileColumn
from server.tasks.requests import request_task
from shared.errors import Conflict, NotFound
from shared.job import JobError, JobState, Progress
from shared.program import SignedManifest
from shared.recipe import Recipe
from shared.signing import sign_manifest

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
    state: Mapped[ProgramState] = mapped_column(text_enum(ProgramState), index=True)
    signed: Mapped[SignedManifest | None] = mapped_column(Document(SignedManifest))
    error: Mapped[JobError | None] = mapped_column(Document(JobError))
    created_at: Mapped[datetime] = mapped_column(UtcTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)  # the latest attempt
    ready_at: Mapped[datetime | None] = mapped_column(UtcTime)
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


FILES = (FileColumn(ProgramBlob.sha256),)


class ProgramRepository(Repository):
    """Programs in one session."""

    def get(self, recipe_id: str) -> Program | None:
        """Returns the program of a recipe."""
        return self._one(Program, Program.recipe_id == recipe_id)

    def get_one(self, recipe_id: str, *, lock: bool = False) -> Program:
        """Returns the program of a recipe, which is known to exist. lock: until the transaction ends."""
        return self._session.scalars(locked(select(Program).where(Program.recipe_id == recipe_id), lock=lock)).one()

    def state(self, recipe_id: str) -> ProgramState | None:
        """Returns the state of a recipe's program; None if it has none."""
        return self._session.scalar(select(Program.state).where(Program.recipe_id == recipe_id))

    def page(self, request: PageRequest) -> PageRows[Program]:
        """Some of all programs, newest first."""
        return page_of(self._session, Program, request)

    def counts(self) -> dict[ProgramState, int]:
        """Returns the number of programs in each state."""
        counts = dict.fromkeys(ProgramState, 0)
        for state, count in self._session.execute(select(Program.state, func.count()).group_by(Program.state)):
            counts[state] = count
        return counts

    def base(self, program: Program) -> BaseModelEntry:
        """Returns the program's base model."""
        return self._session.get_one(BaseModelEntry, program.base_number)

    def signed(self, recipe_id: str) -> SignedManifest | None:
        """The signed manifest of a recipe's program, once it is compiled."""
        text = self._session.scalar(_SIGNED, {"recipe_id": recipe_id})
        return None if text is None else _parse_signed(text)

    def compiled(self) -> Sequence[Program]:
        """Every program that has a signed manifest."""
        return self._session.scalars(select(Program).where(Program.signed.is_not(None)).order_by(Program.number)).all()

    def set_files(self, recipe_id: str, version: int, files: Sequence[ProgramBlob]) -> None:
        """Stores that a version of a program has these files, and forgets those of all but the version before."""
        self._session.execute(
            delete(ProgramBlob).where(ProgramBlob.recipe_id == recipe_id, ProgramBlob.version != version - 1)
        )
        self._session.add_all(files)


# Built once, and parsed once: each lease that is given has a manifest, and few programs make most of them.
_SIGNED = select(type_coerce(Program.signed, Text)).where(Program.recipe_id == bindparam("recipe_id"))


@lru_cache(maxsize=256)
def _parse_signed(text: str) -> SignedManifest:
    return SignedManifest.model_validate_json(text)


FindFile = Callable[[Session, str, str], ProgramBlob | None]


@dataclass(frozen=True)
class ProgramAccess:
    """Finds the programs that callers may read; each function returns None for one that the caller may not read.

    program_of_tenant: takes a tenant and a recipe id. file_of_tenant: takes a tenant and a sha256. files_of_device:
    each takes a device id and a sha256, and the first file found counts. is_awaited: returns whether a job waits for
    the program of a recipe id.
    """

    program_of_tenant: Callable[[Session, str, str], Program | None]
    file_of_tenant: FindFile
    files_of_device: tuple[FindFile, ...]
    is_awaited: Callable[[Session, str], bool]


ACCESS: Port[ProgramAccess] = Port("programs.access")
# Called after a program has changed its state, in the same transaction.
MOVED: Port[Callable[[Session, Program], None]] = Port("programs.moved")
# Called with a recipe id and the progress of its compilation, in the same transaction.
PROGRESSED: Port[Callable[[Session, str, Progress], None]] = Port("programs.progressed")


TRANSITIONS: dict[ProgramState, frozenset[ProgramState]] = {
    ProgramState.PENDING: frozenset({ProgramState.COMPILING, ProgramState.READY, ProgramState.FAILED}),
    ProgramState.COMPILING: frozenset({ProgramState.PENDING, ProgramState.READY, ProgramState.FAILED}),
    ProgramState.READY: frozenset({ProgramState.PENDING}),  # is compiled again
    ProgramState.FAILED: frozenset({ProgramState.PENDING}),  # requested again, because the cause may be gone
}

# The state of a job that waits for a program in that state.
JOB_STATES = {
    ProgramState.PENDING: JobState.QUEUED,
    ProgramState.COMPILING: JobState.COMPILING,
    ProgramState.READY: JobState.READY,
    ProgramState.FAILED: JobState.FAILED,
}


def move_program(session: Session, program: Program, state: ProgramState, **changes: Any) -> None:
    """Moves a program to `state` and sets other columns with it; jobs that wait for it follow, with its error.

    Raises Conflict if the move is not allowed.
    """
    change_state(program, state, TRANSITIONS, f"the program of recipe {program.recipe_id}", changes)
    program.progress = None
    MOVED.get()(session, program)


OPERATOR = ""  # the tenant of an operator's requests in the task queue; no tenant can have this name


class ProgramService:
    """Programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = ProgramRepository(session)

    def request(self, recipe: Recipe, base: BaseModelEntry) -> JobState:
        """Ensures that a recipe has a program, locked unless it is ready. Returns the state of a job that uses it.

        A program is compiled at most once. One that failed before is compiled again, because the cause may be gone.
        """
        state = self._programs.state(recipe.id)
        if state is None:
            add_if_absent(
                self._session,
                Program,
                recipe_id=recipe.id,
                recipe=recipe,
                base_number=base.number,
                state=ProgramState.PENDING,
                created_at=utc_now(),
            )
        if state is ProgramState.READY:
            return JOB_STATES[state]
        # The lock orders this transaction and the one that publishes the program, so that no job misses it.
        program = self._programs.get_one(recipe.id, lock=True)
        if program.state is ProgramState.FAILED:
            move_program(self._session, program, ProgramState.PENDING, error=None)
        return JOB_STATES[program.state]

    def recompile(self, recipe_id: str) -> Program:
        """Requests the next version of a program. Devices get the current version until then.

        Raises NotFound, or Conflict if the program is waiting or being compiled.
        """
        if self._programs.get(recipe_id) is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}; `mobizo-server program list` shows them")
        program = self._programs.get_one(recipe_id, lock=True)
        if program.state not in (ProgramState.READY, ProgramState.FAILED):
            raise Conflict(f"the program of recipe {recipe_id} is {program.state}; it is compiled anyway")
        move_program(self._session, program, ProgramState.PENDING, error=None, recompiling=True)
        request_task(self._session, COMPILE, recipe_id, OPERATOR)
        return program

    def manifest(self, tenant: str, recipe_id: str) -> SignedManifest:
        """Returns the signed manifest of a program that a job of the tenant uses. Raises NotFound until it is ready."""
        program = ACCESS.get().program_of_tenant(self._session, tenant, recipe_id)
        if program is None or program.signed is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}, or it is not compiled yet")
        return program.signed


def sign_programs(session: Session, key: Ed25519PrivateKey) -> int:
    """Signs the manifest of every compiled program with `key`; returns their number."""
    signed = 0
    for program in ProgramRepository(session).compiled():
        if program.signed is not None:
            program.signed = sign_manifest(program.signed.manifest, key)
            signed += 1
    return signed
