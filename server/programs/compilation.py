"""Who compiles what: workers claim programs, keep them by heartbeats, and end with a program or a reason.

The table decides, whichever way a worker learned that there is something to do. A worker that is killed stops its
heartbeats, and the program is another's when its time is over. What such a worker would still report counts no more,
so that one program results. Knows no compiler and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.jobs.lifecycle import JobLifecycle
from server.jobs.repository import JobRepository
from server.programs.lifecycle import ProgramLifecycle
from server.programs.models import Program, ProgramBlob, ProgramState
from server.programs.repository import ProgramRepository, WorkerRepository
from server.programs.room import MemoryRoom, backoff
from server.programs.waiting import Candidate, WaitingRepository
from server.settings import Settings
from shared.errors import CompileFailed, CompileTooLarge, MobizoError
from shared.job import JobError, Progress
from shared.program import SignedManifest
from shared.recipe import Recipe

_MAX_DETAIL = 4000


@dataclass(frozen=True)
class Assignment:
    """What a worker has to compile."""

    recipe: Recipe
    source: str
    version: int  # what the program's manifest will state: devices refuse one under what they have seen


class CompileQueue:
    """Programs to compile, in one writing transaction."""

    def __init__(self, session: Session, settings: Settings, worker_id: str) -> None:
        self._programs = ProgramRepository(session)
        self._waiting = WaitingRepository(session)
        self._workers = WorkerRepository(session)
        self._jobs = JobRepository(session)
        self._lifecycle = ProgramLifecycle(session)
        self._job_lifecycle = JobLifecycle(session)
        self._settings = settings
        self._worker_id = worker_id

    def claim(self) -> Assignment | None:
        """The program whose turn it is and that this worker's machine has memory for, now this worker's; or None.

        One whose workers died too often, or that fits no machine, fails here.
        """
        now = utc_now()
        self._take_back(now)
        room = MemoryRoom(self._waiting, self._worker_id, now)
        while (candidate := self._waiting.next(now)) is not None:
            program = candidate.program
            if program.memory_bytes > (most := room.most_bytes()):
                self._fail(program, _too_large(program, int(most)))
                continue
            chosen = self._fitting(candidate, room, now)
            if chosen is None:
                return None
            self._waiting.took_turn(chosen.tenant)
            return self._assign(chosen.program, now)
        return None

    def keep(self, recipe_id: str, progress: Progress | None = None) -> bool:
        """A heartbeat. False if the compilation is to stop: nobody waits for it any more, or it is another's.

        progress: what the jobs that wait are told, if it is news.
        """
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return False
        if not program.anew and not self._jobs.is_wanted(recipe_id):
            self._give_back(program, counts=False)
            return False
        if progress is not None and progress != program.progress:
            program.progress = progress
            for job in self._jobs.wanting(recipe_id):
                self._job_lifecycle.progress(job, progress)
        self._extend(program)
        return True

    def finish(self, recipe_id: str, signed: SignedManifest) -> bool:
        """The program is ready and so are its jobs. False, and nothing happens, if it was not this worker's."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return False
        version = signed.manifest.version
        self._programs.set_files(
            recipe_id,
            version,
            [
                ProgramBlob(recipe_id=recipe_id, version=version, role=file.role, name=file.name, sha256=file.sha256)
                for file in signed.manifest.files
            ],
        )
        ready = {"signed": signed, "ready_at": utc_now(), "anew": False, "error": None}
        self._lifecycle.move(program, ProgramState.READY, **ready)
        return True

    def fail(self, recipe_id: str, error: MobizoError) -> None:
        """The program cannot be compiled, and its jobs fail with the reason."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is not None:
            self._fail(program, error)

    def retry(self, recipe_id: str, error: MobizoError) -> None:
        """The compiler crashed: another try after a while, or failure with `error` if there were enough."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return
        if program.attempts >= self._settings.compile_attempts:
            self._fail(program, error)
            return
        wait = backoff(self._settings, program.attempts)
        self._give_back(program, counts=True)
        program.next_attempt_at = utc_now() + wait
        left = self._settings.compile_attempts - program.attempts
        why = f"the compiler crashed; it is tried again in {wait.total_seconds():.0f} s, {left} more at most"
        for job in self._jobs.wanting(recipe_id):
            self._job_lifecycle.progress(job, Progress(phase="compiling", why=why))

    def release(self, recipe_id: str) -> None:
        """The worker stops; the try does not count."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is not None:
            self._give_back(program, counts=False)

    def vanished(self, recipe_id: str, worker_id: str) -> None:
        """Takes a program back from a worker whose process is known to be dead, before its time is over."""
        program = self._programs.held(recipe_id, worker_id)
        if program is not None:
            self._lost(program)

    def _take_back(self, now: datetime) -> None:
        for program in self._waiting.lapsed(now):
            self._lost(program)

    def _lost(self, program: Program) -> None:
        """The worker died; perhaps the program killed it."""
        if program.attempts >= self._settings.compile_attempts:
            self._fail(program, CompileFailed("the compiler was killed every time; is there enough memory?"))
        else:
            self._give_back(program, counts=True)

    def _fitting(self, first: Candidate, room: MemoryRoom, now: datetime) -> Candidate | None:
        """`first`, or the next that fits beside what the machine compiles now; None if neither may start."""
        if room.fits(first.program.memory_bytes):
            return first
        if room.worth_waiting(first.program.memory_bytes, first.since):
            return None
        return self._waiting.next(now, room.free_bytes())

    def _assign(self, program: Program, now: datetime) -> Assignment:
        attempts = program.attempts + 1
        self._lifecycle.move(
            program, ProgramState.COMPILING, worker_id=self._worker_id, attempts=attempts, started_at=now
        )
        self._extend(program)
        # Also a worker that lost its claim may have had this number; what it made is never published.
        version = 1 if program.signed is None else program.signed.manifest.version + 1
        return Assignment(program.recipe, self._programs.source(program), version)

    def _extend(self, program: Program) -> None:
        program.lease_expires_at = utc_now() + timedelta(seconds=self._settings.compile_lease_seconds)

    def _give_back(self, program: Program, *, counts: bool) -> None:
        attempts = program.attempts if counts else program.attempts - 1
        self._lifecycle.move(program, ProgramState.PENDING, attempts=attempts)

    def _fail(self, program: Program, error: MobizoError) -> None:
        reason = JobError(code=error.code, detail=error.detail[:_MAX_DETAIL])
        # A program that only was to be made anew is still there as it was.
        state = ProgramState.READY if program.anew and program.signed is not None else ProgramState.FAILED
        self._lifecycle.move(program, state, error=reason, anew=False)


def _too_large(program: Program, most: int) -> CompileTooLarge:
    return CompileTooLarge(
        f"compiling this takes about {program.memory_bytes:,} bytes of memory, and no machine with workers may "
        f"give more than {most:,} (MOBIZO_COMPILE_BUDGET_BYTES); use a smaller base model, or a larger machine"
    )
