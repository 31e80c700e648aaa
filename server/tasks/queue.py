"""The worker's side of the work queue: claim, heartbeat, complete, and the ends of attempts without a result.

DBOS decides which turn begins where; the tables of tasks decide which task a turn runs and what its attempts cost. The
result of an attempt that lost its claim is dropped, so each task is published once. Locks are taken in this order: the
machine (claims only), the subject, the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.settings import Settings
from server.tasks.handlers import Handler, Postponed, as_error, is_outage
from server.tasks.repository import UNFINISHED, Task, TaskRepository, TaskState, WorkerRepository
from server.tasks.turns import enqueue_turn
from shared.errors import MobizoError
from shared.job import JobError

FIRST_BACKOFF, MAX_BACKOFF = timedelta(seconds=5), timedelta(minutes=10)  # after a crash
MAX_OUTAGE = timedelta(hours=6)  # a task whose store is unavailable for longer fails
OUTAGE_SECONDS = 10.0  # between two attempts while a store is unavailable
PUT_BACK_SECONDS = 2.0  # until the next turn of a task that found too little free memory
_log = structlog.get_logger()


@dataclass(frozen=True)
class Claim:
    """The attempt of one worker at a task, and its order."""

    id: str
    kind: str
    subject: str
    order: Any


class TaskQueue:
    """The queue for one worker, in one writing transaction. handlers: by kind of task."""

    def __init__(self, session: Session, settings: Settings, worker_id: str, handlers: Mapping[str, Handler]) -> None:
        self._session, self._settings, self._worker_id, self._handlers = session, settings, worker_id, handlers
        self._tasks, self._workers = TaskRepository(session), WorkerRepository(session)

    def claim(self, kind: str, tenant: str, tag: int) -> Claim | None:
        """Begins a turn: claims the tenant's next task that this worker's machine has memory for.

        Returns None if there is none. If tasks of the tenant wait for memory or for their time, the turn is put back.
        """
        now = utc_now()
        self._tasks.serve(kind, tag)
        if kind not in self._handlers:
            self._end_unknown(kind)
            return None
        capacity = self._workers.capacity_locked(self._worker_id, now)
        free = 0 if self._tasks.is_overdue(capacity.free, capacity.machine, now) else max(0, capacity.free)
        while (task := self._tasks.next(kind, tenant, now)) is not None:
            if free < task.memory_bytes <= capacity.largest:
                task = self._tasks.next(kind, tenant, now, free)
                if task is None:
                    break
            if not self._lock(task) or not self._tasks.startable_locked(task, now):
                continue
            if task.memory_bytes > capacity.largest:
                self._fail(task, self._handlers[kind].too_large(task.memory_bytes, int(capacity.largest)))
                continue
            try:
                with self._session.begin_nested():
                    order = self._handlers[kind].begin(self._session, task.subject)
                    self._session.flush()
            except Postponed as later:
                task.not_before = now + timedelta(seconds=later.seconds)
            except DBAPIError:
                raise
            except Exception as error:
                self._refuse(task, as_error(error))
            else:
                task.state, task.worker_id, task.not_before = TaskState.RUNNING, self._worker_id, None
                task.claim_id = new_id("claim")
                task.attempts += 1
                return Claim(task.claim_id, kind, task.subject, order)
            self._session.flush()
        if (waiting := self._tasks.waiting(kind, tenant)) is not None:
            pause = 0.0 if waiting.not_before is None else (waiting.not_before - now).total_seconds()
            enqueue_turn(self._session, kind, tenant, tag, max(PUT_BACK_SECONDS, pause))
        return None

    def heartbeat(self, claim: Claim) -> bool:
        """Publishes progress. Returns False if the work must stop: the claim is lost, or the task has no requests."""
        task = self._claimed_task(claim)
        if task is None:
            return False
        if not self._tasks.is_requested(task):
            self._release(task)
            return False
        self._handlers[claim.kind].heartbeat(self._session, claim.order)
        return True

    def complete(self, claim: Claim, result: Any) -> bool:
        """Publishes a result. Returns False without publishing if the claim is lost or the order is outdated."""
        task = self._claimed_task(claim, signs=True)
        if task is None:
            return False
        if not self._handlers[claim.kind].publish(self._session, claim.order, result):
            self._release(task)
            return False
        self._tasks.end(task, TaskState.DONE)
        return True

    def fail(self, claim: Claim, error: MobizoError) -> None:
        """Fails a task permanently."""
        task = self._claimed_task(claim)
        if task is not None:
            self._fail(task, error)

    def retry(self, claim: Claim, error: MobizoError) -> None:
        """Ends a crashed attempt: the next one follows after a pause; after the last attempt the task fails."""
        task = self._claimed_task(claim)
        if task is None:
            return
        left = self._settings.compile_attempts - task.attempts
        if left <= 0:
            self._fail(task, error)
            return
        task.unavailable_since = None
        pause = min(FIRST_BACKOFF * 2 ** (task.attempts - 1), MAX_BACKOFF)
        why = f"it crashed and is tried again in {pause.total_seconds():.0f} s, {left} more times at most"
        self._wait(task, why, pause)

    def await_store(self, claim: Claim, error: MobizoError) -> None:
        """Ends an attempt that found a store unavailable or full. It does not count until `MAX_OUTAGE` has passed."""
        task = self._claimed_task(claim)
        if task is None:
            return
        if self._waited_too_long(task):
            self._fail(task, error)
            return
        task.attempts -= 1
        self._wait(task, f"waiting: {error.detail}", timedelta(seconds=OUTAGE_SECONDS))

    def release(self, claim: Claim) -> None:
        """Returns a task of a worker that stops to the queue; the attempt does not count."""
        task = self._claimed_task(claim)
        if task is not None:
            self._release(task)

    def take_back(self, task: Task) -> None:
        """Ends the attempt of a dead worker. The attempt counts, because the task may have killed the worker."""
        if task.kind not in self._handlers:
            self._end_unknown(task.kind)
        elif self._lock(task):
            lost = self._tasks.claimed_locked(task.kind, task.subject, task.claim_id or "")
            if lost is None:
                return
            if lost.attempts >= self._settings.compile_attempts:
                self._fail(lost, self._handlers[task.kind].killed())
            else:
                self._wait(lost)

    def _refuse(self, task: Task, error: MobizoError) -> None:
        """Ends or postpones a task that cannot begin."""
        _log.warning("task-refused", kind=task.kind, subject=task.subject, code=error.code, detail=error.detail)
        if is_outage(error) and not self._waited_too_long(task):
            task.not_before = utc_now() + timedelta(seconds=OUTAGE_SECONDS)
        else:
            self._fail(task, error)

    @staticmethod
    def _waited_too_long(task: Task) -> bool:
        """Returns whether a task has waited for a store for too long; the wait begins with the first call."""
        now = utc_now()
        task.unavailable_since = task.unavailable_since or now
        return now - task.unavailable_since > MAX_OUTAGE

    def _end_unknown(self, kind: str) -> None:
        """Fails the unfinished tasks of a kind that this release does not have."""
        error = JobError(code="unknown-task", detail=f"this release of the server has no tasks of the kind {kind!r}")
        for task in self._tasks.unfinished(kind):
            task.error = error
            self._tasks.end(task, TaskState.FAILED)
            _log.error("task-unknown", kind=kind, subject=task.subject)

    def _lock(self, task: Task, *, signs: bool = False) -> bool:
        """Locks the subject of a task. If it no longer exists, cancels the task and returns False."""
        if self._handlers[task.kind].lock(self._session, task.subject, signs=signs):
            return True
        previous = self._tasks.get_locked(task.kind, task.subject)
        if previous is not None and previous.state in UNFINISHED:
            self._tasks.end(previous, TaskState.CANCELLED)
        return False

    def _claimed_task(self, claim: Claim, *, signs: bool = False) -> Task | None:
        task = self._tasks.get(claim.kind, claim.subject)
        if task is None or not self._lock(task, signs=signs):
            return None
        return self._tasks.claimed_locked(claim.kind, claim.subject, claim.id)

    def _release(self, task: Task) -> None:
        task.attempts -= 1
        self._wait(task)

    def _wait(self, task: Task, why: str | None = None, pause: timedelta | None = None) -> None:
        """Returns a task to the queue, with a turn of each tenant that requests it."""
        task.state, task.worker_id, task.claim_id = TaskState.WAITING, None, None
        task.not_before = None if pause is None else utc_now() + pause
        self._handlers[task.kind].wait(self._session, task.subject, why)
        self._session.flush()
        delay = 0.0 if pause is None else pause.total_seconds()
        for tenant in self._tasks.tenants(task):
            enqueue_turn(self._session, task.kind, tenant, self._tasks.next_tag(task.kind, tenant), delay)

    def _fail(self, task: Task, error: MobizoError) -> None:
        task.error = JobError.of(error)
        try:
            with self._session.begin_nested():
                self._handlers[task.kind].fail(self._session, task.subject, error)
        except MobizoError:
            # The task ends all the same, so that it does not run for ever.
            _log.exception("task-not-marked-failed", kind=task.kind, subject=task.subject)
        self._tasks.end(task, TaskState.FAILED)
