"""Compiling programs: the handler of compile tasks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
from sqlalchemy.orm import Session

from server.catalog.bases import BaseRepository
from server.catalog.calibrations.service import calibration_file
from server.compiler.cost import compile_bytes
from server.database.columns import utc_now
from server.identity.signing_keys.service import KeyService
from server.programs.compiler_process import CompilerCrashed, CompilerProcess
from server.programs.service import (
    ACCESS,
    COMPILE,
    PROGRESSED,
    Program,
    ProgramBlob,
    ProgramRepository,
    ProgramState,
    move_program,
)
from server.settings import Settings
from server.storage.store import ArtifactStore, hold
from server.tasks.handlers import Handler, TaskRun
from shared.errors import MobizoError
from shared.job import JobError, Progress
from shared.program import ProgramManifest
from shared.recipe import Recipe
from shared.signing import sign_manifest

NEWS_SECONDS = 3.0  # minimum time between two updates, because each adds an event to every waiting job
_STAGES = {
    "read": "reading the base model",
    "lower": "lowering its layers",
    "emit": "writing the program",
}
_log = structlog.get_logger()


class CompileProgress:
    """The progress of one compilation. `update` and `news` may be called from different threads.

    log: bound to the worker and the recipe, so that log lines can be attributed to them.
    """

    def __init__(self, log: structlog.typing.FilteringBoundLogger | None = None) -> None:
        self._log = log if log is not None else _log
        self._current: str | None = None
        self._published: str | None = None
        self._published_at = float("-inf")

    def update(self, message: dict[str, Any]) -> None:
        """Takes a stage that the compiler reports."""
        self._log.info("compiling", stage=message)
        stage, fraction = message.get("stage"), message.get("fraction")
        if isinstance(stage, str):
            text = _STAGES.get(stage, stage[:100])
            is_partial = isinstance(fraction, int | float) and 0 < fraction < 1
            self._current = f"{text}, {fraction:.0%}" if is_partial else text

    def news(self) -> Progress | None:
        """Returns the progress to publish to waiting jobs; None if nothing is new or the last news is recent."""
        current = self._current
        if current is None or current == self._published or time.monotonic() - self._published_at < NEWS_SECONDS:
            return None
        self._published, self._published_at = current, time.monotonic()
        return Progress(phase="compiling", why=current)


@dataclass(frozen=True)
class CompileOrder:
    """The input of one compilation."""

    recipe: Recipe
    source: str
    version: int  # of the manifest; devices reject a lower version than they have seen
    progress: CompileProgress


@dataclass(frozen=True)
class CompileHandler(Handler):
    """Compiles programs in child processes."""

    settings: Settings
    artifacts: ArtifactStore

    kind: ClassVar[str] = COMPILE
    subject_name: ClassVar[str] = "recipe"

    def memory_bytes(self, session: Session, subject: str) -> int:
        """Returns the estimated peak memory of compiling the program."""
        programs = ProgramRepository(session)
        program = programs.get_one(subject)
        base = programs.base(program)
        return compile_bytes(program.recipe, base.shape, base.parameters)

    def begin(self, session: Session, subject: str) -> CompileOrder | None:
        """Moves the program and its jobs to COMPILING and returns the order; None if nothing waits for the program."""
        programs = ProgramRepository(session)
        program = programs.get_one(subject, lock=True)
        if program.state is not ProgramState.PENDING or not _is_awaited(session, program):
            return None
        move_program(session, program, ProgramState.COMPILING, started_at=utc_now())
        # A worker that lost its claim may have used the same number; its result is never published.
        version = 1 if program.signed is None else program.signed.manifest.version + 1
        progress = CompileProgress(_log.bind(recipe=subject))
        return CompileOrder(program.recipe, programs.base(program).source, version, progress)

    def heartbeat(self, session: Session, order: CompileOrder) -> bool:
        """Publishes the progress to the waiting jobs. Returns False if there are none."""
        program, progress = ProgramRepository(session).get_one(order.recipe.id, lock=True), order.progress.news()
        if progress is not None and progress != program.progress:
            program.progress = progress
            PROGRESSED.get()(session, order.recipe.id, progress)
        return _is_awaited(session, program)

    def run(self, order: CompileOrder, run: TaskRun) -> ProgramManifest:
        """Compiles the program and stores its files."""
        compiler = CompilerProcess(
            command=self.settings.compiler_command,
            interval=run.interval,
            memory_limit=self.settings.compile_budget_bytes,
            keep=run.should_continue,
            on_stage=order.progress.update,
            lowered=self.settings.lowered_path,
        )
        run.child_peak_bytes = lambda: compiler.peak_rss_bytes
        with self.artifacts.workspace(run.id) as workspace:
            calibration = calibration_file(self.artifacts, order.recipe)
            manifest = compiler.run(order.recipe, order.source, workspace, calibration)
            for file in manifest.files:
                self.artifacts.adopt(workspace / "program" / file.name, file.sha256)
        return manifest.model_copy(update={"version": order.version})

    def publish(self, session: Session, order: CompileOrder, result: ProgramManifest) -> bool:
        """Signs the program and moves it and its jobs to READY, with the signing key locked, and then the program."""
        key = KeyService(session, self.settings).private()
        programs, version = ProgramRepository(session), result.version
        program = programs.get_one(result.recipe_id, lock=True)
        hold(session, self.artifacts, [file.sha256 for file in result.files])
        base = BaseRepository(session).by_name(result.recipe.base.name)
        if base is not None and base.sha256 == result.recipe.base.sha256:
            result = result.model_copy(update={"chat_template": base.chat_template})
        signed = sign_manifest(result, key)
        files = [
            ProgramBlob(recipe_id=result.recipe_id, version=version, role=file.role, name=file.name, sha256=file.sha256)
            for file in result.files
        ]
        programs.set_files(result.recipe_id, version, files)
        ready = {"signed": signed, "ready_at": utc_now(), "recompiling": False, "error": None}
        move_program(session, program, ProgramState.READY, **ready)
        return True

    def wait(self, session: Session, subject: str, why: str | None) -> None:
        """Moves the program and its jobs back to waiting; after a crash or an outage the jobs show it."""
        move_program(session, ProgramRepository(session).get_one(subject, lock=True), ProgramState.PENDING)
        if why is not None:
            PROGRESSED.get()(session, subject, Progress(phase="compiling", why=why))

    def fail(self, session: Session, subject: str, error: MobizoError) -> None:
        """Moves the program and its jobs to FAILED. If a recompilation fails, the current version stays READY."""
        program = ProgramRepository(session).get_one(subject, lock=True)
        reason = JobError.of(error)
        state = ProgramState.READY if program.recompiling and program.signed is not None else ProgramState.FAILED
        move_program(session, program, state, error=reason, recompiling=False)

    def is_transient(self, error: MobizoError) -> bool:
        """Crashes are retried; errors that the compiler reports are not."""
        return isinstance(error, CompilerCrashed)


def _is_awaited(session: Session, program: Program) -> bool:
    """Returns whether an operator or a job waits for a program."""
    return program.recompiling or ACCESS.get().is_awaited(session, program.recipe_id)
