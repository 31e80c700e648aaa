"""Programs: their state machine, requesting and reading them, and signing them again after a key rotation.

Jobs that wait for a program follow its state. The ports by which programs reach jobs and the registry, which lie above
them, are declared here; `server.wiring` connects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from server.catalog.bases import BaseModelEntry
from server.clock import utc_now
from server.database.locking import add_if_absent
from server.ports import Port
from server.programs.models import COMPILE, Program, ProgramBlob, ProgramState
from server.programs.repository import ProgramRepository
from server.tasks.service import TaskService
from shared.errors import Conflict, NotFound
from shared.job import JobState, Progress
from shared.program import SignedManifest
from shared.recipe import Precision, Recipe
from shared.signing import sign_manifest
from shared.zo.lora import BaseShape, flat_size

FindFile = Callable[[Session, str, str], ProgramBlob | None]
LIBRARIES_BYTES = 450 << 20  # torch and ExecuTorch, before a model is read

# Peak bytes for each weight of the base. Measured on SmolLM2-135M (134.5 million weights), XNNPACK, as the
# compiler's largest resident size: fp32 1,458 MiB, which is 7.9 a weight; int8-weight 1,762 MiB, 10.2.
_WEIGHT_BYTES: dict[Precision, float] = {
    "fp32": 8.0,  # float32 when read, and float32 when written
    "int8": 10.5,  # float32 when read, and quantized when written
    "int4": 10.5,
    "int8-weight": 10.5,
    "int4-weight": 10.5,
}
_ADAPTED_BYTES = 30  # for each element of B: B, A and the graphs that contain them; rank 64 on all layers: 1,750 MiB


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


def compile_bytes(recipe: Recipe, shape: BaseShape, parameters: int) -> int:
    """Estimates the peak resident bytes of compiling `recipe` for a base of that shape and number of parameters."""
    weights = parameters * _WEIGHT_BYTES[recipe.precision]
    return LIBRARIES_BYTES + round(weights) + _ADAPTED_BYTES * flat_size(recipe, shape)


OPERATOR = ""  # the tenant of an operator's requests in the task queue; no tenant can have this name


class ProgramService:
    """Programs in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._programs = ProgramRepository(session)
        self._tasks = TaskService(session)
        self._lifecycle = ProgramLifecycle(session)

    def request(self, recipe: Recipe, base: BaseModelEntry) -> JobState:
        """Requests a recipe's program and returns the initial state of a job that waits for it.

        A program is compiled at most once. One that failed before is compiled again, because the cause may be gone.
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
                created_at=utc_now(),
            )
        if program is None or program.state is not ProgramState.READY:
            # The lock orders this transaction and the one that publishes the program, so that no job misses it.
            program = self._programs.named_locked(recipe.id)
        if program.state is ProgramState.FAILED:
            self._lifecycle.move(program, ProgramState.PENDING, error=None)
        if program.state is not ProgramState.READY:
            self._tasks.schedule(COMPILE, recipe.id, memory_bytes)
        return JOB_STATES[program.state]

    def recompile(self, recipe_id: str) -> Program:
        """Requests the next version of a program. Devices get the current version until then.

        Raises NotFound, or Conflict if the program is waiting or being compiled.
        """
        if self._programs.get(recipe_id) is None:
            raise NotFound(f"there is no program of recipe {recipe_id!r}; `mobizo-server programs list` shows them")
        program = self._programs.named_locked(recipe_id)
        if program.state not in (ProgramState.READY, ProgramState.FAILED):
            raise Conflict(f"the program of recipe {recipe_id} is {program.state}; it is compiled anyway")
        self._lifecycle.move(program, ProgramState.PENDING, error=None, recompiling=True)
        base = self._programs.base(program)
        self._tasks.schedule(COMPILE, recipe_id, compile_bytes(program.recipe, base.shape, base.parameters))
        self._tasks.request(COMPILE, recipe_id, f"operator:{recipe_id}", OPERATOR)
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
