"""Asking for programs and reading them. Knows no HTTP and no compiler."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.programs.models import Program, ProgramState
from server.programs.repository import ProgramRepository
from shared.errors import NotFound
from shared.job import JobState
from shared.program import SignedManifest
from shared.recipe import Recipe

_JOB_STATE = {
    ProgramState.PENDING: JobState.QUEUED,
    ProgramState.COMPILING: JobState.COMPILING,
    ProgramState.READY: JobState.READY,
}


class ProgramService:
    """Programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._programs = ProgramRepository(session)

    def want(self, recipe: Recipe, base_number: int) -> JobState:
        """Asks for a recipe's program and returns the state in which a job that waits for it begins.

        Compiled at most once; one that failed before is tried anew, since its cause may be gone.
        """
        # Locked: a worker that ends meanwhile would not see the job that is about to wait for it.
        program = self._programs.get_locked(recipe.id)
        if program is None:
            program = Program(
                recipe_id=recipe.id,
                recipe=recipe,
                base_number=base_number,
                state=ProgramState.PENDING,
                attempts=0,
                created_at=utc_now(),
            )
            self._programs.add(program)
        elif program.state is ProgramState.FAILED:
            program.state, program.attempts, program.error = ProgramState.PENDING, 0, None
        return _JOB_STATE[program.state]

    def manifest(self, tenant: str, recipe_id: str) -> SignedManifest:
        """The signed manifest of a program that a job of the tenant asked for. Raises NotFound until it is ready."""
        program = self._programs.of_tenant(tenant, recipe_id)
        if program is None or program.signed is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}, or it is not compiled yet")
        return program.signed
