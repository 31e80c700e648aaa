"""The one way a program changes: along its state machine, and the jobs that wait for it go with it.

Knows no worker, no compiler and no HTTP.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from server.jobs.lifecycle import JobLifecycle
from server.jobs.repository import JobRepository
from server.programs.models import Program, ProgramState
from shared.errors import Conflict
from shared.job import JobState

MOVES: dict[ProgramState, frozenset[ProgramState]] = {
    ProgramState.PENDING: frozenset({ProgramState.COMPILING, ProgramState.READY, ProgramState.FAILED}),
    ProgramState.COMPILING: frozenset({ProgramState.PENDING, ProgramState.READY, ProgramState.FAILED}),
    ProgramState.READY: frozenset({ProgramState.PENDING}),  # to be compiled anew
    ProgramState.FAILED: frozenset({ProgramState.PENDING}),  # asked for again: the cause may be gone
}

# Where a job stands that waits for a program in that state.
JOB_STATES = {
    ProgramState.PENDING: JobState.QUEUED,
    ProgramState.COMPILING: JobState.COMPILING,
    ProgramState.READY: JobState.READY,
    ProgramState.FAILED: JobState.FAILED,
}


class ProgramLifecycle:
    """Changes to programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._jobs = JobRepository(session)
        self._lifecycle = JobLifecycle(session)

    def move(self, program: Program, state: ProgramState, **changes: Any) -> None:
        """Moves a program to `state` and sets other columns with it; jobs that wait for it follow, with its error.

        Raises Conflict if it cannot go there.
        """
        if state not in MOVES[program.state]:
            raise Conflict(f"the program of recipe {program.recipe_id} is {program.state}; it cannot become {state}")
        program.state = state
        for name, value in changes.items():
            setattr(program, name, value)
        if state is not ProgramState.COMPILING:
            program.worker_id = program.lease_expires_at = None
        if state is not ProgramState.PENDING:
            program.next_attempt_at = None
        program.progress = None
        follow = JOB_STATES[state]
        error = {"error": program.error} if state is ProgramState.FAILED else {}
        for job in self._jobs.wanting(program.recipe_id):
            if job.state is not follow:
                progress = None if job.progress is None or job.progress.phase == "compiling" else job.progress
                self._lifecycle.move(job, follow, progress=progress, **error)
