"""Who compiles what: workers claim programs, keep them by heartbeats, and end with a program or a reason.

A worker that is killed stops its heartbeats, and the program is another's when its time is over. What such a worker
would still report counts no more, so that one program results. Knows no compiler and no files.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.jobs.lifecycle import JobLifecycle
from server.jobs.models import Job
from server.jobs.repository import JobRepository
from server.programs.models import Program, ProgramBlob, ProgramState
from server.programs.repository import ProgramRepository
from server.settings import Settings
from shared.errors import CompileFailed, MobizoError
from shared.job import JobError, JobState
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
        self._jobs = JobRepository(session)
        self._lifecycle = JobLifecycle(session)
        self._settings = settings
        self._worker_id = worker_id

    def claim(self) -> Assignment | None:
        """The oldest program that a job waits for, now this worker's; None if there is none.

        One whose workers died too often fails here.
        """
        while (program := self._programs.claimable(utc_now())) is not None:
            if program.attempts >= self._settings.compile_attempts:
                self._fail(program, CompileFailed("the compiler was killed every time; is there enough memory?"))
                continue
            program.state = ProgramState.COMPILING
            program.worker_id = self._worker_id
            program.attempts += 1
            self._extend(program)
            for job in self._jobs.wanting(program.recipe_id):
                if job.state is JobState.QUEUED:
                    self._lifecycle.move(job, JobState.COMPILING)
            # Also a worker that lost its claim may have had this number; what it made is never published.
            version = 1 if program.signed is None else program.signed.manifest.version + 1
            return Assignment(program.recipe, self._programs.source(program), version)
        return None

    def keep(self, recipe_id: str) -> bool:
        """A heartbeat. False if the compilation is to stop: nobody waits for it any more, or it is another's."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return False
        if not self._jobs.wanting(recipe_id):
            self._give_back(program)
            program.attempts -= 1
            return False
        self._extend(program)
        return True

    def finish(self, recipe_id: str, signed: SignedManifest) -> bool:
        """The program is ready and so are its jobs. False, and nothing happens, if it was not this worker's."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return False
        program.state = ProgramState.READY
        program.lease_expires_at = None
        program.signed = signed
        program.ready_at = utc_now()
        version = signed.manifest.version
        self._programs.set_files(
            recipe_id,
            version,
            [
                ProgramBlob(recipe_id=recipe_id, version=version, role=file.role, name=file.name, sha256=file.sha256)
                for file in signed.manifest.files
            ],
        )
        for job in self._jobs.wanting(recipe_id):
            self._lifecycle.move(job, JobState.READY)
        return True

    def fail(self, recipe_id: str, error: MobizoError) -> None:
        """The program cannot be compiled, and its jobs fail with the reason."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is not None:
            self._fail(program, error)

    def retry(self, recipe_id: str, error: MobizoError) -> None:
        """The compiler crashed: another try, or failure with `error` if there were enough."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is None:
            return
        if program.attempts >= self._settings.compile_attempts:
            self._fail(program, error)
        else:
            self._give_back(program)

    def release(self, recipe_id: str) -> None:
        """The worker stops; the try does not count."""
        program = self._programs.held(recipe_id, self._worker_id)
        if program is not None:
            self._give_back(program)
            program.attempts -= 1

    def _extend(self, program: Program) -> None:
        program.lease_expires_at = utc_now() + timedelta(seconds=self._settings.compile_lease_seconds)

    def _give_back(self, program: Program) -> None:
        program.state = ProgramState.PENDING
        program.worker_id = None
        program.lease_expires_at = None
        for job in self._compiling(program):
            self._lifecycle.move(job, JobState.QUEUED)

    def _compiling(self, program: Program) -> list[Job]:
        return [job for job in self._jobs.wanting(program.recipe_id) if job.state is JobState.COMPILING]

    def _fail(self, program: Program, error: MobizoError) -> None:
        program.state = ProgramState.FAILED
        program.lease_expires_at = None
        program.error = JobError(code=error.code, detail=error.detail[:_MAX_DETAIL])
        for job in self._jobs.wanting(program.recipe_id):
            self._lifecycle.move(job, JobState.FAILED, error=program.error)
