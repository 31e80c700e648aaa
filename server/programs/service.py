"""Asking for programs and reading them. Knows no HTTP and no compiler."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.bases.models import BaseModelEntry
from server.clock import utc_now
from server.db.upsert import add_if_absent
from server.programs.announcement import note_wanted
from server.programs.lifecycle import JOB_STATES, ProgramLifecycle
from server.programs.memory import compile_bytes
from server.programs.models import Program, ProgramState
from server.programs.repository import ProgramRepository
from server.programs.waiting import OPERATOR, WaitingRepository
from shared.errors import Conflict, NotFound
from shared.job import JobState
from shared.program import SignedManifest
from shared.recipe import Recipe


class ProgramService:
    """Programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = ProgramRepository(session)
        self._waiting = WaitingRepository(session)
        self._lifecycle = ProgramLifecycle(session)

    def want(self, recipe: Recipe, base: BaseModelEntry, tenant: str) -> JobState:
        """Asks for a recipe's program and returns the state in which a job of the tenant that waits for it begins.

        Compiled at most once; one that failed before is tried anew, since its cause may be gone.
        """
        memory_bytes = compile_bytes(recipe, base.shape, base.parameters)
        program = self._programs.get(recipe.id)
        if program is None:
            add_if_absent(
                self._session,
                Program,
                recipe_id=recipe.id,
                recipe=recipe,
                base_number=base.number,
                state=ProgramState.PENDING,
                attempts=0,
                memory_bytes=memory_bytes,
                created_at=utc_now(),
            )
        if program is None or program.state is not ProgramState.READY:
            # Locked, so that a worker that ends its compile now finds the job that waits, or the job finds it ended.
            program = self._programs.named_locked(recipe.id)
        if program.state is ProgramState.FAILED:
            self._lifecycle.move(program, ProgramState.PENDING, attempts=0, error=None, memory_bytes=memory_bytes)
        if program.state is not ProgramState.READY:
            self._waiting.take_turns(tenant)
            note_wanted(self._session, recipe.id)
        return JOB_STATES[program.state]

    def recompile(self, recipe_id: str) -> Program:
        """Asks for a program's next version. Until it is there devices get the one that is.

        Raises NotFound, or Conflict if it is waiting or being compiled.
        """
        if self._programs.get(recipe_id) is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}; `mobizo-server programs list` shows them")
        program = self._programs.named_locked(recipe_id)
        if program.state not in (ProgramState.READY, ProgramState.FAILED):
            raise Conflict(f"the program of recipe {recipe_id} is {program.state}; it is compiled anyway")
        self._lifecycle.move(program, ProgramState.PENDING, attempts=0, error=None, anew=True)
        self._waiting.take_turns(OPERATOR)
        note_wanted(self._session, recipe_id)
        return program

    def manifest(self, tenant: str, recipe_id: str) -> SignedManifest:
        """The signed manifest of a program that a job of the tenant asked for. Raises NotFound until it is ready."""
        program = self._programs.of_tenant(tenant, recipe_id)
        if program is None or program.signed is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}, or it is not compiled yet")
        return program.signed
