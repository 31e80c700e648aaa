"""The worker process: compiles the programs that jobs wait for, and takes lapsed leases back.

`python -m server.worker`, with the server's settings in the environment. Any number may run at once, and each may be
killed at any moment. Imports neither torch nor a web framework.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from types import FrameType

import structlog
from sqlalchemy.orm import Session

from server.artifacts.collection import Collector, Housekeeping
from server.artifacts.naming import hold
from server.artifacts.opening import open_artifacts
from server.clock import utc_now
from server.db.database import Database
from server.db.schema import programs
from server.identity import new_id
from server.keys import load_key
from server.leases.service import LeaseService
from server.logs import configure_logs
from server.programs.compilation import Assignment, CompileQueue
from server.programs.compiler_process import CompilerCrashed, CompilerProcess, Stopped
from server.programs.repository import ProgramRepository, WorkerRepository
from server.settings import Settings
from shared.errors import MobizoError
from shared.program import ProgramManifest
from shared.signing import sign_manifest

KIBIBYTE = 1024
_log = structlog.get_logger()


class CompileWorker:
    """One worker; `stop` may be called from a signal handler."""

    def __init__(self, settings: Settings) -> None:
        self.id = new_id("worker")
        self._settings = settings
        self._database = Database(settings.url)
        self._artifacts = open_artifacts(settings)
        self._key = load_key(settings.key_path)
        self._stopping = threading.Event()
        collector = Collector(self._database, self._artifacts, self._stopping.is_set)
        self._housekeeping = Housekeeping(settings, collector)
        self._interval = min(1.0, settings.compile_lease_seconds / 4)

    def stop(self) -> None:
        """Ends `run` soon; a compilation under way is another worker's then."""
        self._stopping.set()

    def run(self) -> None:
        """Works until stopped."""
        now = utc_now()
        with self._database.writing() as session:
            WorkerRepository(session).add(programs.Worker(id=self.id, pid=os.getpid(), started_at=now, seen_at=now))
        _log.info("worker-started", worker=self.id)
        while not self._stopping.is_set():
            self._take_back_leases()
            self._housekeeping.look()
            with self._database.writing() as session:
                assignment = self._queue_in(session).claim()
            if assignment is None:
                self._stopping.wait(self._settings.poll_seconds)
            else:
                self._compile(assignment)
        self._database.close()
        _log.info("worker-stopped", worker=self.id)

    def _queue_in(self, session: Session) -> CompileQueue:
        return CompileQueue(session, self._settings, self.id)

    def _take_back_leases(self) -> None:
        with self._database.writing() as session:
            LeaseService(session, self._settings.lease_seconds).take_back_overdue()

    def _compile(self, assignment: Assignment) -> None:
        recipe = assignment.recipe
        log = _log.bind(worker=self.id, recipe=recipe.id)
        compiler = CompilerProcess(
            command=self._settings.compiler_command,
            interval=self._interval,
            memory_limit=self._settings.compile_memory_bytes,
            keep=lambda: self._keep(recipe.id, compiler),
        )
        log.info("compile-started")
        self._sweep()
        with self._artifacts.workspace(self.id) as workspace:
            try:
                outcome = compiler.run(recipe, assignment.source, workspace)
                if isinstance(outcome, Stopped):
                    with self._database.writing() as session:
                        self._queue_in(session).release(recipe.id)
                    log.info("compile-stopped")
                else:
                    for file in outcome.files:
                        self._artifacts.adopt(workspace / "program" / file.name, file.sha256)
                    self._finish(outcome.model_copy(update={"version": assignment.version}), log)
            except CompilerCrashed as error:
                with self._database.writing() as session:
                    self._queue_in(session).retry(recipe.id, error)
                log.error("compile-crashed", detail=error.detail)
            except MobizoError as error:
                with self._database.writing() as session:
                    self._queue_in(session).fail(recipe.id, error)
                log.error("compile-failed", code=error.code, detail=error.detail)
        self._note_memory(compiler)

    def _sweep(self) -> None:
        """Removes what workers left that were killed; a workspace has its worker's name."""
        # Listed first: a workspace is made after its program was claimed, so a live one's holder is found below.
        names = self._artifacts.workspaces()
        with self._database.reading() as session:
            holders = ProgramRepository(session).holders(utc_now())
        for name in set(names) - set(holders):
            self._artifacts.remove_workspace(name)

    def _finish(self, manifest: ProgramManifest, log: structlog.typing.FilteringBoundLogger) -> None:
        signed = sign_manifest(manifest, self._key)
        with self._database.writing() as session:
            hold(session, self._artifacts, [file.sha256 for file in manifest.files])
            counted = self._queue_in(session).finish(manifest.recipe_id, signed)
        log.info("compile-finished", counted=counted)

    def _keep(self, recipe_id: str, compiler: CompilerProcess) -> bool:
        if self._stopping.is_set():
            return False
        self._take_back_leases()
        self._note_memory(compiler)
        with self._database.writing() as session:
            return self._queue_in(session).keep(recipe_id)

    def _note_memory(self, compiler: CompilerProcess) -> None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIBIBYTE
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
        with self._database.writing() as session:
            worker = WorkerRepository(session).get(self.id)
            worker.seen_at = utc_now()
            worker.peak_rss_bytes = own
            worker.compiler_peak_rss_bytes = max(worker.compiler_peak_rss_bytes, compiler.peak_rss_bytes, ended)


def main() -> None:
    """A worker until SIGTERM or SIGINT."""
    configure_logs()
    worker = CompileWorker(Settings())

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    worker.run()


if __name__ == "__main__":
    main()
