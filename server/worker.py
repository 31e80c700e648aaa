"""The worker process: compiles the programs that jobs wait for, merges adapters, makes the versions of cohorts'
rounds, and takes lapsed leases back.

`python -m server.worker`, with the server's settings in the environment. Any number may run at once, and each may be
killed at any moment. Imports neither torch nor a web framework.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

import structlog
from sqlalchemy.orm import Session

from server.adapters.backlog import Signing
from server.adapters.removal import Removal
from server.artifacts.collection import Collector, Housekeeping
from server.artifacts.naming import hold
from server.artifacts.opening import open_artifacts
from server.calibrations.reading import calibration_file
from server.clock import utc_now
from server.cohorts.queue import RoundQueue
from server.cohorts.round_repository import RoundRepository
from server.cohorts.watch import RoundWatch
from server.cohorts.work import RoundWork
from server.db.database import Database
from server.db.schema import programs
from server.formats.repository import ConversionRepository
from server.formats.work import ConversionWork
from server.identity import new_id
from server.jobs.thinning import Thinning
from server.keys import load_key
from server.leases.service import LeaseService
from server.logs import configure_logs
from server.programs.compilation import Assignment, CompileQueue
from server.programs.compiler_process import CompilerCrashed, CompilerProcess
from server.programs.memory import host_budget
from server.programs.repository import ProgramRepository, WorkerRepository
from server.programs.stages import Stages
from server.programs.waiting import WaitingRepository
from server.settings import Settings
from server.succession.service import KeyService
from server.work.child import ChildProcess, Stopped
from server.work.engine import engine_of, prepare_engine
from server.work.outage import OUTAGES, insist
from server.work.whereabouts import host_name, is_dead, pid_space
from shared.errors import MobizoError, Unavailable
from shared.program import ProgramManifest
from shared.signing import sign_manifest

KIBIBYTE = 1024
NOTED_SECONDS = 15  # between two times that a worker says that it lives
Ended = TypeVar("Ended")
_log = structlog.get_logger()


class CompileWorker:
    """One worker; `stop` may be called from a signal handler."""

    def __init__(self, settings: Settings) -> None:
        self.id = new_id("worker")
        self.stopping = threading.Event()
        self._settings = settings
        self._engine = engine_of(settings)
        self._database = Database(settings.url, settings.tuning)
        self._artifacts = open_artifacts(settings)
        collector = Collector(self._database, self._artifacts, self.stopping.is_set)
        self._housekeeping = Housekeeping(settings, collector)
        self._removal = Removal(self._database, settings.adapter_grace, self.stopping.is_set)
        self._signing = Signing(self._database, settings, self.stopping.is_set)
        self._thinning = Thinning(self._database, settings.event_days, self.stopping.is_set)
        load_key(settings.key_path)
        self._interval = min(1.0, settings.compile_lease_seconds / 4)
        self._conversions = ConversionWork(
            settings,
            self._database,
            self._artifacts,
            self.id,
            self.stopping,
            self._interval,
            sweep=self._sweep,
            beat=self._beat,
        )
        self._rounds = RoundWork(
            settings,
            self._database,
            self._artifacts,
            self.id,
            self.stopping,
            self._interval,
            beat=lambda: self._beat(None),
        )
        self._watch = RoundWatch(self._database, self._artifacts)
        self._kinds: list[Callable[[], bool]] = [self._work_on_program, self._conversions.work, self._rounds.work]
        self._pid_space = pid_space()
        self._noted = time.monotonic()

    def stop(self) -> None:
        """Ends `run` soon; a compilation under way is another worker's then."""
        self.stopping.set()

    def run(self) -> None:
        """Works until stopped."""
        prepare_engine(self._database, self._settings)
        self._register()
        _log.info("worker-started", worker=self.id, engine=self._settings.engine)
        self._engine.run(self)
        self._database.close()
        _log.info("worker-stopped", worker=self.id)

    def work(self) -> bool:
        """Claims a program, a conversion or a round whose turn it is and brings it to an end; False if there was none.

        The kind that came last is looked at last, so that none keeps the others waiting.
        """
        for kind in list(self._kinds):
            if self.stopping.is_set():
                return False
            if kind():
                self._kinds.remove(kind)
                self._kinds.append(kind)
                return True
        return False

    def _work_on_program(self) -> bool:
        with self._database.writing() as session:
            assignment = self._queue_in(session).claim()
        if assignment is None:
            return False
        self._compile(assignment)
        return True

    def look_around(self) -> bool:
        """Takes back what dead workers and silent devices held; True if there may be something to claim."""
        if time.monotonic() - self._noted > NOTED_SECONDS:
            self._note_memory()
        self._take_back_leases()
        self._removal.look()
        self._housekeeping.look()
        self._signing.look()
        self._thinning.look()
        self._watch.look()
        with self._database.reading() as session:
            waiting = WaitingRepository(session)
            dead = [
                (program.recipe_id, worker.id)
                for program, worker in waiting.under_way(self._pid_space)
                if self._pid_space and worker.id != self.id and is_dead(worker.pid, worker.started_at)
            ]
            conversions = ConversionRepository(session)
            dead_conversions = [
                (conversion.id, worker.id)
                for conversion, worker in conversions.under_way(self._pid_space)
                if self._pid_space and worker.id != self.id and is_dead(worker.pid, worker.started_at)
            ]
            rounds = RoundRepository(session)
            dead_rounds = [
                (found.id, worker.id)
                for found, worker in rounds.in_work(self._pid_space)
                if self._pid_space and worker.id != self.id and is_dead(worker.pid, worker.started_at)
            ]
            something = waiting.any(utc_now()) or conversions.any(utc_now()) or rounds.any(utc_now())
        if dead or dead_conversions or dead_rounds:
            with self._database.writing() as session:
                for recipe_id, worker_id in dead:
                    self._queue_in(session).vanished(recipe_id, worker_id)
                for conversion_id, worker_id in dead_conversions:
                    self._conversions.queue(session).vanished(conversion_id, worker_id)
                for round_id, worker_id in dead_rounds:
                    RoundQueue(session, self._settings, self.id).vanished(round_id, worker_id)
        return something or bool(dead or dead_conversions or dead_rounds)

    def startable(self, limit: int) -> list[str]:
        """Recipe ids of programs, ids of conversions and of rounds that wait and might be claimed now."""
        with self._database.reading() as session:
            now = utc_now()
            found = [*WaitingRepository(session).startable(now, limit)]
            found += ConversionRepository(session).startable(now, limit)
            return [*found, *RoundRepository(session).startable(now, limit)]

    def _register(self) -> None:
        now, host = utc_now(), host_name(self._settings)
        worker = programs.Worker(
            id=self.id, pid=os.getpid(), host=host, pid_space=self._pid_space, started_at=now, seen_at=now
        )
        with self._database.writing() as session:
            WorkerRepository(session).add(worker)
            WaitingRepository(session).keep_host(host, *host_budget(self._settings), now)

    def _queue_in(self, session: Session) -> CompileQueue:
        return CompileQueue(session, self._settings, self.id)

    def _take_back_leases(self) -> None:
        with self._database.writing() as session:
            LeaseService(session, self._settings.lease_seconds).take_back_overdue()

    def _compile(self, assignment: Assignment) -> None:
        recipe = assignment.recipe
        log = _log.bind(worker=self.id, recipe=recipe.id)
        stages = Stages(log)
        compiler = CompilerProcess(
            command=self._settings.compiler_command,
            interval=self._interval,
            memory_limit=self._settings.compile_memory_bytes,
            keep=lambda: self._keep(recipe.id, compiler, stages),
            hear=stages.hear,
        )
        log.info("compile-started")
        self._sweep()
        with self._artifacts.workspace(self.id) as workspace:
            try:
                calibration = calibration_file(self._artifacts, recipe)
                outcome = compiler.run(recipe, assignment.source, workspace, calibration)
                if isinstance(outcome, Stopped):
                    self._end(lambda queue: queue.release(recipe.id))
                    log.info("compile-stopped")
                else:
                    for file in outcome.files:
                        self._artifacts.adopt(workspace / "program" / file.name, file.sha256)
                    self._finish(outcome.model_copy(update={"version": assignment.version}), log)
            except (CompilerCrashed, Unavailable) as error:
                reason = error
                self._end(lambda queue: queue.retry(recipe.id, reason))
                log.error("compile-crashed", detail=error.detail)
            except MobizoError as error:
                refusal = error
                self._end(lambda queue: queue.fail(recipe.id, refusal))
                log.error("compile-failed", code=error.code, detail=error.detail)
        self._note_memory(compiler)

    def _end(self, end: Callable[[CompileQueue], Ended]) -> Ended:
        """Ends a claim in one transaction, however long the database is away; a claim lost meanwhile counts nothing."""

        def ended() -> Ended:
            with self._database.writing() as session:
                return end(self._queue_in(session))

        return insist(ended, self.stopping)

    def _sweep(self) -> None:
        """Removes what workers left that were killed; a workspace has its worker's name."""
        # Listed first: a workspace is made after its program was claimed, so a live one's holder is found below.
        names = self._artifacts.workspaces()
        with self._database.reading() as session:
            now = utc_now()
            holders = [*ProgramRepository(session).holders(now), *ConversionRepository(session).holders(now)]
        for name in set(names) - set(holders):
            self._artifacts.remove_workspace(name)

    def _finish(self, manifest: ProgramManifest, log: structlog.typing.FilteringBoundLogger) -> None:
        def finish() -> bool:
            with self._database.writing() as session:
                hold(session, self._artifacts, [file.sha256 for file in manifest.files])
                # In the transaction that publishes it, so that no rotation of the key comes between.
                signed = sign_manifest(manifest, KeyService(session, self._settings).private())
                return self._queue_in(session).finish(manifest.recipe_id, signed)

        counted = insist(finish, self.stopping)
        log.info("compile-finished", counted=counted)

    def _keep(self, recipe_id: str, compiler: CompilerProcess, stages: Stages) -> bool:
        if self.stopping.is_set():
            return False
        try:
            self._beat(compiler)
            with self._database.writing() as session:
                return self._queue_in(session).keep(recipe_id, stages.news())
        except OUTAGES as error:
            # The compile goes on: if the claim is lost meanwhile, what it makes is not counted.
            _log.warning("database-away", worker=self.id, error=str(error))
            return True

    def _beat(self, process: ChildProcess | None) -> None:
        self._take_back_leases()
        self._note_memory(process)

    def _note_memory(self, compiler: ChildProcess | None = None) -> None:
        """Says that this worker lives, and what it and its compilers took."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIBIBYTE
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
        running = compiler.peak_rss_bytes if compiler is not None else 0
        self._noted = time.monotonic()
        with self._database.writing() as session:
            worker = WorkerRepository(session).get(self.id)
            worker.seen_at = utc_now()
            WaitingRepository(session).keep_host(worker.host, *host_budget(self._settings), worker.seen_at)
            worker.peak_rss_bytes = own
            worker.compiler_peak_rss_bytes = max(worker.compiler_peak_rss_bytes, running, ended)


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
