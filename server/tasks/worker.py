"""The worker: runs tasks and periodic sweeps, which DBOS starts, and sends heartbeats.

`server.worker` registers handlers and sweeps and starts the process. Any number of workers may run at once, and each
runs one task of each kind at a time. Each may be killed at any time: another worker that misses its heartbeats takes
its tasks back, and resumes what DBOS had started in it. Workers of one machine share its memory for tasks and notice
each other's death at once.
"""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import psutil
import structlog
from dbos import DBOS
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.settings import Settings
from server.tasks.child_process import Stopped
from server.tasks.handlers import Handler, TaskRun, as_error
from server.tasks.queue import Claim, TaskQueue
from server.tasks.repository import TaskRepository, WorkerProcess
from server.tasks.requests import APPLICATION, FIRST, TASK, enqueue
from server.tasks.sweeps import EVERY_MINUTE, OUTAGES, run_guarded
from shared.stop_signal import StopSignal

KIBIBYTE = 1024
SHARE = 0.8  # of a machine's memory is for tasks; the rest is for workers, the server and files
DRAIN_SECONDS = 60  # a stopping worker waits this long for its tasks, which release their claims within a second or so
SWEEPS = "sweeps"  # the name of the queue of sweeps
_SWEEPS_AT_ONCE = 4
_CONNECTIONS = 5  # of DBOS to the database, beside our own
_SWEEP_POLLS = 4  # a queue of sweeps is polled so many times more seldom: none of them is urgent to a second
_RETRY_SECONDS = 1.0  # between two attempts to end a task while the database is unavailable
_KEEP_ENDED = timedelta(hours=1)  # rows of ended tasks and sweeps
_DELETED_AT_ONCE = 500
_REPORT_SECONDS = 5.0  # between two heartbeats of a worker
_UPKEEP_SECONDS = 2.0
_CLAIM_AGAIN_SECONDS = 10.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_LATER = timedelta(seconds=5)  # a process that began this much later than a worker has only reused its id
Ended = TypeVar("Ended")
_log = structlog.get_logger()


class Worker:
    """One worker process."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self.id = new_id("worker")
        self.stopping = StopSignal()
        self.sweeps: dict[str, tuple[str, Callable[[], object]]] = {}  # schedule and work, by name
        self._settings, self._database = settings, database
        self._handlers: dict[str, Handler] = {}
        self._interval = min(1.0, settings.compile_lease_seconds / 4)
        self._pid_space = pid_space()
        self._runs: dict[str, TaskRun] = {}
        self._sweeping: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)

    def handle(self, *handlers: Handler) -> None:
        """Registers the handlers of kinds of tasks."""
        self._handlers |= {handler.kind: handler for handler in handlers}

    def sweep(self, name: str, schedule: str, run: Callable[[], object]) -> None:
        """Registers a sweep. schedule: cron with seconds, in UTC. Sweeps of several workers may overlap."""
        self.sweeps[name] = schedule, run

    def stop(self) -> None:
        """Ends `run` soon; another worker runs its tasks."""
        self.stopping.set()

    def run(self) -> None:
        """Works until stopped."""
        self.register()
        self.sweep("ended-tasks", EVERY_MINUTE, _delete_ended)
        with self._repeated(min(_REPORT_SECONDS, self._settings.compile_lease_seconds / 4), self._report):
            self._launch()
            _log.info("worker-started", worker=self.id)
            with self._repeated(_UPKEEP_SECONDS, self._keep_up):
                self.stopping.wait()
            # With a timeout DBOS waits for at least a second. A sweep may end at any time.
            DBOS.destroy(workflow_completion_timeout_sec=DRAIN_SECONDS if self._runs else 0)
        _log.info("worker-stopped", worker=self.id)

    def register(self) -> None:
        """Registers this worker and the memory of its machine."""
        now, (memory_bytes, limited) = utc_now(), host_budget(self._settings)
        with self._database.writing() as session:
            session.add(
                WorkerProcess(
                    id=self.id,
                    pid=os.getpid(),
                    host=socket.gethostname(),
                    pid_space=self._pid_space,
                    started_at=now,
                    seen_at=now,
                    memory_bytes=memory_bytes,
                    limited=limited,
                )
            )

    def run_task(self, kind: str, subject: str, tag: int, since: float) -> bool:
        """Runs a task that DBOS has started. Returns whether it was claimed."""
        if kind not in self._handlers:
            _log.error("task-unknown", kind=kind, subject=subject)
            return False

        def claimed() -> Claim | None:
            with self._database.writing() as session:
                if self.stopping.is_set():
                    enqueue(session, kind, subject, tag, since=since)
                    return None
                claim = self._queue(session).claim(kind, subject, tag, since)
                session.flush()
                return claim

        try:
            claim = insist(claimed, self.stopping)
        except Exception:
            _log.exception("claim-failed", worker=self.id, kind=kind, subject=subject)
            with self._database.writing() as session:
                enqueue(session, kind, subject, FIRST, since=since, delay=_CLAIM_AGAIN_SECONDS)
            return False
        if claim is not None:
            self._run(claim)
        return claim is not None

    def run_sweep(self, name: str) -> None:
        """Runs a sweep, unless it still runs in this worker."""
        lock = self._sweeping[name]
        if name in self.sweeps and not self.stopping.is_set() and lock.acquire(blocking=False):
            try:
                run_guarded(self._database, name, self.sweeps[name][1])
            finally:
                lock.release()

    def take_back(self) -> set[str]:
        """Takes the tasks of dead workers back. Returns the ids of the workers that are alive."""
        since = utc_now() - timedelta(seconds=self._settings.compile_lease_seconds)
        with self._database.reading() as session:
            tasks = TaskRepository(session)
            alive = {worker.id for worker in tasks.seen(since) if not self._is_dead(worker)}
            lost = tasks.lost(alive, lock=False)
        if lost:
            with self._database.writing() as session:
                self._queue(session).take_back(alive)
        return alive

    def _launch(self) -> None:
        """Starts DBOS in this process: its queues, one of each kind of task and one of sweeps, and its schedules."""
        DBOS(
            config={
                "name": APPLICATION,
                "system_database_url": self._settings.url,
                "executor_id": self.id,
                "application_version": "1",  # of all releases, so that a task of one release runs in another
                "use_listen_notify": False,
                "enable_otlp": False,
                "log_level": "WARNING",
                "sys_db_pool_size": _CONNECTIONS,
            }
        )

        @DBOS.workflow(name=TASK)
        def run_task(kind: str, subject: str, tag: int, since: float) -> None:
            self.run_task(kind, subject, tag, since)

        @DBOS.workflow(name="sweep")
        def run_sweep(scheduled_at: datetime, name: str) -> None:
            self.run_sweep(name)

        DBOS.launch()
        for queue in (*self._handlers, SWEEPS):
            DBOS.register_queue(
                queue,
                worker_concurrency=_SWEEPS_AT_ONCE if queue == SWEEPS else 1,
                polling_interval_sec=self._settings.poll_seconds * (_SWEEP_POLLS if queue == SWEEPS else 1),
                on_conflict="always_update",
            )
        for schedule in DBOS.list_schedules():
            if schedule["schedule_name"] not in self.sweeps:
                DBOS.delete_schedule(schedule["schedule_name"])
        DBOS.apply_schedules(
            [
                {
                    "schedule_name": name,
                    "workflow_fn": run_sweep,
                    "schedule": schedule,
                    "context": name,
                    "queue_name": SWEEPS,
                }
                for name, (schedule, _) in self.sweeps.items()
            ]
        )

    def _keep_up(self) -> None:
        """Notices dead workers, takes back their tasks and resumes what DBOS had started in them."""
        run_guarded(self._database, "lost-tasks", lambda: resume(self.take_back()))

    def _is_dead(self, worker: WorkerProcess) -> bool:
        """Returns whether a worker of this machine has ended; False if that is unknown."""
        comparable = self._pid_space and worker.pid_space == self._pid_space and worker.id != self.id
        return bool(comparable) and is_dead(worker.pid, worker.started_at)

    def _queue(self, session: Session) -> TaskQueue:
        return TaskQueue(session, self._settings, self.id, self._handlers)

    def _run(self, claim: Claim) -> None:
        handler = self._handlers[claim.kind]
        log = _log.bind(worker=self.id, **{handler.subject_name: claim.subject})
        log.info(f"{claim.kind}-started")
        lost = threading.Event()
        run = TaskRun(claim.id, self._interval, lambda: not (self.stopping.is_set() or lost.is_set()))
        self._runs[claim.id] = run
        try:
            with self._repeated(self._interval, lambda: self._beat(claim, lost)):
                result = handler.run(claim.order, run)
            log.info(f"{claim.kind}-finished", counted=self._end(claim, result))
        except Stopped as stopped:
            self._end(claim, stopped)
            log.info(f"{claim.kind}-stopped")
        except Exception as failure:
            error = as_error(failure)
            self._end(claim, error)
            log.error(f"{claim.kind}-failed", code=error.code, detail=error.detail, exc_info=error is not failure)
        finally:
            del self._runs[claim.id]

    def _end(self, claim: Claim, outcome: object) -> bool:
        """Ends a claim in one transaction, and retries while the database is unavailable."""

        def ended() -> bool:
            with self._database.writing() as session:
                return self._queue(session).end(claim, outcome)

        return insist(ended, self.stopping, DRAIN_SECONDS)

    def _beat(self, claim: Claim, lost: threading.Event) -> None:
        """Sets `lost` once the claim is lost or nothing waits for the result."""
        with self._database.writing() as session:
            if not self._queue(session).heartbeat(claim):
                lost.set()

    @contextmanager
    def _repeated(self, seconds: float, do: Callable[[], object]) -> Iterator[None]:
        """Calls `do` in a thread until the block ends. Its exceptions are logged, and the next call follows."""
        done = threading.Event()

        def repeat() -> None:
            while not done.wait(seconds):
                try:
                    do()
                except OUTAGES as error:
                    _log.warning("database-away", worker=self.id, error=str(error))
                except Exception:
                    _log.exception("heartbeat-failed", worker=self.id)

        thread = threading.Thread(target=repeat, name="heartbeats")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _report(self) -> None:
        """Stores a heartbeat of this worker, and the peak memory of it and its child processes."""
        child_peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * KIBIBYTE
        worker_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIBIBYTE
        running = [run.child_peak_bytes() for run in list(self._runs.values())]
        with self._database.writing() as session:
            worker = session.get_one(WorkerProcess, self.id)
            worker.seen_at = utc_now()
            worker.peak_rss_bytes = worker_peak
            worker.compiler_peak_rss_bytes = max(worker.compiler_peak_rss_bytes, child_peak, *running)


def insist(do: Callable[[], Ended], stopping: StopSignal, grace_seconds: float = 0.0) -> Ended:
    """Runs `do`, one transaction, until the database is available.

    Raises the error of `do` if that takes more than `grace_seconds` after `stopping` was set.
    """
    deadline: float | None = None
    while True:
        try:
            return do()
        except OUTAGES as error:
            _log.warning("database-away", error=str(error))
            if stopping.is_set():
                deadline = deadline or time.monotonic() + grace_seconds
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                stopping.wait(_RETRY_SECONDS)


def resume(alive: set[str]) -> None:
    """Lets other workers run what DBOS had started in workers that are not alive.

    A task that two workers resume may run twice, which is harmless: the second finds it claimed or ended.
    """
    for started in DBOS.list_workflows(status="PENDING", load_input=False, load_output=False):
        if started.executor_id not in alive:
            _log.warning("workflow-resumed", worker=started.executor_id, queue=started.queue_name)
            DBOS.resume_workflow(started.workflow_id, queue_name=started.queue_name)


def _delete_ended() -> None:
    before = (datetime.now(UTC) - _KEEP_ENDED).isoformat()
    ended = DBOS.list_workflows(completed_before=before, limit=_DELETED_AT_ONCE, load_input=False, load_output=False)
    if ended:
        DBOS.delete_workflows([each.workflow_id for each in ended])


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
