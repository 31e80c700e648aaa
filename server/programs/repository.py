"""All SQL about programs and their files."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry
from server.database.locking import locked
from server.database.paging import PageRequest, PageRows, page_of
from server.programs.models import Program, ProgramBlob
from shared.program import SignedManifest


class ProgramRepository:
    """Programs in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, program: Program) -> None:
        """Stores a new program."""
        self._session.add(program)
        self._session.flush()

    def get(self, recipe_id: str) -> Program | None:
        """Returns the program of a recipe."""
        return self._session.scalar(select(Program).where(Program.recipe_id == recipe_id))

    def get_locked(self, recipe_id: str) -> Program | None:
        """Returns the program of a recipe, locked until the transaction ends."""
        return self._session.scalar(locked(select(Program).where(Program.recipe_id == recipe_id)))

    def named(self, recipe_id: str) -> Program:
        """Returns the program of a recipe, which is known to exist."""
        return self._session.scalars(select(Program).where(Program.recipe_id == recipe_id)).one()

    def named_locked(self, recipe_id: str) -> Program:
        """Returns the program of a recipe, which is known to exist, locked until the transaction ends."""
        return self._session.scalars(locked(select(Program).where(Program.recipe_id == recipe_id))).one()

    def page(self, request: PageRequest) -> PageRows[Program]:
        """Some of all programs, newest first."""
        return page_of(self._session, select(Program), Program, request)

    def base(self, program: Program) -> BaseModelEntry:
        """The program's base model."""
        return self._session.get_one(BaseModelEntry, program.base_number)

    def signed(self, recipe_id: str) -> SignedManifest | None:
        """The signed manifest of a recipe's program, once it is compiled."""
        return self._session.scalar(select(Program.signed).where(Program.recipe_id == recipe_id))

    def compiled(self) -> Sequence[Program]:
        """Every program that has a signed manifest."""
        return self._session.scalars(select(Program).where(Program.signed.is_not(None)).order_by(Program.number)).all()

    def source(self, program: Program) -> str:
        """Where the program's base model lies."""
        return self.base(program).source

    def set_files(self, recipe_id: str, version: int, files: Sequence[ProgramBlob]) -> None:
        """Stores that a version of a program has these files, and forgets those of all but the version before."""
        self._session.execute(
            delete(ProgramBlob).where(ProgramBlob.recipe_id == recipe_id, ProgramBlob.version != version - 1)
        )
        self._session.add_all(files)
