"""The worker: claims tasks, runs their handlers, extends the claims, and runs periodic sweeps between tasks.

`server.worker` registers handlers and sweeps and starts the process. Any number of workers may run at once, and each
may be killed at any time. Workers of one machine share its memory for tasks and notice each other's death.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import structlog
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.settings import Settings
from server.tasks.child_process import Stopped
from server.tasks.engine import OUTAGES, engine_of, insist, prepare_engine
from server.tasks.handlers import Handler, TaskRun
from server.tasks.queue import Claim, TaskQueue
from server.tasks.repository import TaskRepository, WorkerProcess, WorkerRepository
from shared.errors import MobizoError
from shared.stop_signal import StopSignal

KIBIBYTE = 1024
REPORT_SECONDS = 15  # between two heartbeats of an idle worker
Ended = TypeVar("Ended")
_log = structlog.get_logger()
SHARE = 0.8  # of a machine's memory is for tasks; the rest is for workers, the server and files
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LATER = timedelta(seconds=5)  # a process that began this much later than a worker has only reused its id


class Worker:
    """One worker process."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.id = new_id("worker")
        self.stopping = StopSignal()
        self._settings, self._database = settings, database
        self._engine = engine_of(settings)
        self._handlers: dict[str, Handler] = {}
        self._sweeps: list[Callable[[], None]] = []
        self._urgent: list[Callable[[], None]] = []
        self._interval = min(1.0, settings.compile_lease_seconds / 4)
        self._pid_space = pid_space()
        self._reported = time.monotonic()

    def handle(self, *handlers: Handler) -> None:
        """Registers the handlers of kinds of tasks."""
        self._handlers |= {handler.kind: handler for handler in handlers}

    def sweep(self, *sweeps: Callable[[], None], urgent: bool = False) -> None:
        """Registers sweeps, which are called between tasks. urgent: also called with each heartbeat of a running task.

        A sweep that must run less often keeps track of time itself.
        """
        (self._urgent if urgent else self._sweeps).extend(sweeps)

    def stop(self) -> None:
        """Ends `run` soon; another worker claims the running task."""
        self.stopping.set()

    def run(self) -> None:
        """Works until stopped."""
        prepare_engine(self._database, self._settings)
        self.register()
        _log.info("worker-started", worker=self.id, engine=self._settings.engine)
        self._engine.run(self)
        _log.info("worker-stopped", worker=self.id)

    def register(self) -> None:
        """Registers this worker and the memory of its machine."""
        now, host = utc_now(), host_name(self._settings)
        worker = WorkerProcess(
            id=self.id, pid=os.getpid(), host=host, pid_space=self._pid_space, started_at=now, seen_at=now
        )
        with self._database.writing() as session:
            WorkerRepository(session).add(worker)
            WorkerRepository(session).keep_host(host, *host_budget(self._settings), now)

    def work(self) -> bool:
        """Claims the next task and runs it. Returns False if there was none."""
        if self.stopping.is_set():
            return False
        with self._database.writing() as session:
            claim = self._queue(session).claim()
            session.flush()
            session.expunge_all()  # an order may contain rows
        if claim is not None:
            self._run(claim)
        return claim is not None

    def look_around(self) -> bool:
        """Runs sweeps and takes back tasks of dead workers. Returns whether there may be a task to claim."""
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._report(None)
        for sweep in [*self._urgent, *self._sweeps]:
            sweep()
        with self._database.reading() as session:
            tasks = TaskRepository(session)
            dead = [
                (task, worker.id)
                for task, worker in (tasks.running(self._pid_space) if self._pid_space else ())
                if worker.id != self.id and is_dead(worker.pid, worker.started_at)
            ]
            something = tasks.any(utc_now()) or bool(dead)
        if dead:
            with self._database.writing() as session:
                for task, worker_id in dead:
                    self._queue(session).take_back(task, worker_id)
        return something

    def startable(self, limit: int) -> list[str]:
        """Returns the names of tasks that may be claimed now."""
        with self._database.reading() as session:
            return [task.name for task in TaskRepository(session).claimable(utc_now(), limit)]

    def _queue(self, session: Session) -> TaskQueue:
        return TaskQueue(session, self._settings, self.id, self._handlers)

    def _run(self, claim: Claim) -> None:
        handler = self._handlers[claim.kind]
        log = _log.bind(worker=self.id, **{handler.subject_name: claim.subject})
        log.info(f"{claim.kind}-started")
        lost = threading.Event()
        run = TaskRun(self.id, self._interval, lambda: not (self.stopping.is_set() or lost.is_set()))
        try:
            with self._heartbeats(claim, run, lost):
                outcome = handler.run(claim.order, run)
                if not isinstance(outcome, Stopped):
                    was_counted = self._end(lambda queue: queue.complete(claim, outcome))
        except MobizoError as error:
            reason = error
            if handler.is_transient(error):
                self._end(lambda queue: queue.retry(claim, reason))
                log.error(f"{claim.kind}-crashed", code=error.code, detail=error.detail)
            else:
                self._end(lambda queue: queue.fail(claim, reason))
                log.error(f"{claim.kind}-failed", code=error.code, detail=error.detail)
        else:
            if isinstance(outcome, Stopped):
                self._end(lambda queue: queue.release(claim))
                log.info(f"{claim.kind}-stopped")
            else:
                log.info(f"{claim.kind}-finished", counted=was_counted)
        self._report(run)

    def _end(self, end: Callable[[TaskQueue], Ended]) -> Ended:
        """Ends a claim in one transaction, and retries while the database is unavailable."""

        def ended() -> Ended:
            with self._database.writing() as session:
                return end(self._queue(session))

        return insist(ended, self.stopping)

    @contextmanager
    def _heartbeats(self, claim: Claim, run: TaskRun, lost: threading.Event) -> Iterator[None]:
        """Extends the claim until the block ends; sets `lost` once the claim is lost or the task has no requests."""
        done = threading.Event()

        def beat() -> None:
            while not lost.is_set() and not done.wait(self._interval):
                try:
                    for sweep in self._urgent:
                        sweep()
                    self._report(run)
                    with self._database.writing() as session:
                        if not self._queue(session).heartbeat(claim):
                            lost.set()
                except OUTAGES as error:
                    # The work continues: if the claim is lost meanwhile, its result is dropped.
                    _log.warning("database-away", worker=self.id, error=str(error))

        thread = threading.Thread(target=beat, name="heartbeats")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _report(self, run: TaskRun | None) -> None:
        """Stores a heartbeat of this worker, and the peak memory of it and its child processes."""
        child_peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIBIBYTE
        worker_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
        running = 0 if run is None or run.process is None else run.process.peak_rss_bytes
        self._reported = time.monotonic()
        with self._database.writing() as session:
            workers = WorkerRepository(session)
            worker = workers.get(self.id)
            worker.seen_at = utc_now()
            workers.keep_host(worker.host, *host_budget(self._settings), worker.seen_at)
            worker.peak_rss_bytes = worker_peak
            worker.compiler_peak_rss_bytes = max(worker.compiler_peak_rss_bytes, running, child_peak)


def host_name(settings: Settings) -> str:
    """Returns the machine's name from the settings or the system."""
    return settings.worker_host or socket.gethostname()


def pid_space() -> str:
    """Identifies the boot and namespace in which process ids are comparable; empty if unknown."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def is_dead(pid: int, since: datetime) -> bool:
    """Returns whether the process that had this id at a time has ended."""
    try:
        process = psutil.Process(pid)
        began = datetime.fromtimestamp(process.create_time(), since.tzinfo)
        return bool(process.status() == psutil.STATUS_ZOMBIE or began > since + _LATER)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def host_budget(settings: Settings) -> tuple[int, bool]:
    """Returns the memory for all tasks of this machine, bytes, and whether an operator set it."""
    if settings.compile_budget_bytes is not None:
        return settings.compile_budget_bytes, True
    return round(machine_bytes() * SHARE), False


def machine_bytes(limits: tuple[str, ...] = _CGROUP_LIMITS) -> int:
    """Returns the memory of this machine, or of the container of this process, bytes."""
    total = int(psutil.virtual_memory().total)
    for path in limits:
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total
