"""How a program changes: along its state machine, followed by the jobs that wait for it.

Also the ports by which programs reach jobs and the registry, which lie above them; `server.wiring` connects these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from server.ports import Port
from server.programs.models import Program, ProgramBlob, ProgramState
from shared.errors import Conflict
from shared.job import JobState, Progress

FindFile = Callable[[Session, str, str], ProgramBlob | None]


@dataclass(frozen=True)
class ProgramAccess:
    """Finds the programs that callers may read; each function returns None for one that the caller may not read.

    program_of_tenant: takes a tenant and a recipe id. file_of_tenant: takes a tenant and a sha256. files_of_device:
    each takes a device id and a sha256, and the first file found counts.
    """

    program_of_tenant: Callable[[Session, str, str], Program | None]
    file_of_tenant: FindFile
    files_of_device: tuple[FindFile, ...]


ACCESS: Port[ProgramAccess] = Port("programs.access")
# Called after a program has changed its state, in the same transaction.
MOVED: Port[tuple[Callable[[Session, Program], None], ...]] = Port("programs.moved")
# Called with a recipe id and the progress of its compilation, in the same transaction.
PROGRESSED: Port[tuple[Callable[[Session, str, Progress], None], ...]] = Port("programs.progressed")


MOVES: dict[ProgramState, frozenset[ProgramState]] = {
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


class ProgramLifecycle:
    """Changes to programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def move(self, program: Program, state: ProgramState, **changes: Any) -> None:
        """Moves a program to `state` and sets other columns with it; jobs that wait for it follow, with its error.

        Raises Conflict if the move is not allowed.
        """
        if state not in MOVES[program.state]:
            raise Conflict(f"the program of recipe {program.recipe_id} is {program.state}; it cannot become {state}")
        program.state = state
        for name, value in changes.items():
            setattr(program, name, value)
        program.progress = None
        for notify in MOVED.get():
            notify(self._session, program)
