"""The worker's side of a task: claim, heartbeat, complete, and the ends of attempts without a result.

DBOS decides which task begins where and when; the table of tasks says what its attempts cost. The result of an attempt
that lost its claim is dropped, so each task is published once. Locks are taken in this order: the task, the machine
(claims only), the subject.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.settings import Settings
from server.tasks.child_process import Stopped
from server.tasks.handlers import Handler, Killed, Postponed, as_error, is_outage
from server.tasks.repository import Task, TaskRepository
from server.tasks.requests import enqueue
from shared.errors import CompileTooLarge, MobizoError

FIRST_BACKOFF, MAX_BACKOFF = timedelta(seconds=5), timedelta(minutes=10)  # after a crash
MAX_OUTAGE = timedelta(hours=6)  # a task whose store is unavailable for longer fails
OUTAGE_SECONDS = 10.0  # between two attempts while a store is unavailable
FULL_SECONDS = 2.0  # until the next try of a task that found too little free memory
OVERDUE = timedelta(minutes=10)  # smaller tasks do not overtake a large task that has waited for longer
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
        self._tasks = TaskRepository(session)

    def claim(self, kind: str, subject: str, tag: int, since: float) -> Claim | None:
        """Claims a task that DBOS has started in this worker.

        Returns None if the subject waits for no worker, or for memory or a time; then the task is enqueued again.
        """
        self._tasks.serve(kind, tag)
        task, handler = self._tasks.ensure(kind, subject), self._handlers[kind]
        if task.claim_id is not None:
            return None
        task.memory_bytes = handler.memory_bytes(self._session, subject)
        if not self._has_memory(task, tag, since):
            return None
        try:
            with self._session.begin_nested():
                order = handler.begin(self._session, subject)
                self._session.flush()
        except Postponed as later:
            self._enqueue(task, later.seconds)
        except DBAPIError:
            raise
        except Exception as error:
            self._refuse(task, as_error(error))
        else:
            if order is None:
                self._session.delete(task)
                return None
            task.worker_id, task.claim_id = self._worker_id, new_id("claim")
            task.attempts += 1
            return Claim(task.claim_id, kind, subject, order)
        return None

    def heartbeat(self, claim: Claim) -> bool:
        """Publishes progress. Returns False if the work must stop: the claim is lost, or nothing waits for it."""
        task = self._claimed(claim)
        if task is None:
            return False
        if not self._handlers[claim.kind].heartbeat(self._session, claim.order):
            self._release(task)
            return False
        return True

    def end(self, claim: Claim, outcome: object) -> bool:
        """Ends an attempt. outcome: its result, or the exception that it raised.

        Returns whether a result was published: not if the claim is lost or the order is outdated. An attempt that was
        stopped does not count.
        """
        task = self._claimed(claim)
        if task is None:
            return False
        if isinstance(outcome, Exception) and not isinstance(outcome, Stopped):
            self._end_failed(task, as_error(outcome))
            return False
        if isinstance(outcome, Stopped) or not self._handlers[claim.kind].publish(self._session, claim.order, outcome):
            self._release(task)
            return False
        self._session.delete(task)
        return True

    def _end_failed(self, task: Task, error: MobizoError) -> None:
        """Lets a task wait for a store or for another attempt after a pause, or fails it.

        An attempt that found a store unavailable or full does not count, until `MAX_OUTAGE` has passed.
        """
        left = self._settings.compile_attempts - task.attempts
        if is_outage(error) and not self._waited_too_long(task):
            task.attempts -= 1
            self._wait(task, f"waiting: {error.detail}", OUTAGE_SECONDS)
        elif not is_outage(error) and self._handlers[task.kind].is_transient(error) and left > 0:
            task.unavailable_since = None
            pause = min(FIRST_BACKOFF * 2 ** (task.attempts - 1), MAX_BACKOFF).total_seconds()
            self._wait(task, f"it crashed and is tried again in {pause:.0f} s, {left} more times at most", pause)
        else:
            self._fail(task, error)

    def take_back(self, alive: Collection[str]) -> None:
        """Ends the attempts of workers that are not alive. They count, because a task may have killed its worker."""
        for task in self._tasks.lost(alive, lock=True):
            _log.warning("task-lost", kind=task.kind, subject=task.subject, worker=task.worker_id)
            if task.kind not in self._handlers:
                self._session.delete(task)
            elif task.claim_id is None:
                task.worker_id = None
            elif task.attempts >= self._settings.compile_attempts:
                self._fail(task, Killed())
            else:
                self._wait(task)

    def _has_memory(self, task: Task, tag: int, since: float) -> bool:
        """Returns whether a task may begin now on this machine; otherwise fails it or enqueues it again.

        A task that has waited for too long reserves its share of this machine, so that no smaller one overtakes it.
        """
        now = utc_now()
        capacity = self._tasks.capacity_locked(self._worker_id, task, now)
        if task.memory_bytes > capacity.largest:
            self._fail(task, CompileTooLarge(_too_large(task.memory_bytes, int(capacity.largest))))
            return False
        if task.memory_bytes <= capacity.free:
            return True
        is_overdue = now.timestamp() - since > OVERDUE.total_seconds()
        if is_overdue and task.memory_bytes <= capacity.machine and task.worker_id is None and not capacity.reserved:
            task.worker_id = self._worker_id
        enqueue(self._session, task.kind, task.subject, tag, since=since, delay=FULL_SECONDS)
        return False

    def _refuse(self, task: Task, error: MobizoError) -> None:
        """Ends or postpones a task that cannot begin."""
        _log.warning("task-refused", kind=task.kind, subject=task.subject, code=error.code, detail=error.detail)
        if is_outage(error) and not self._waited_too_long(task):
            self._enqueue(task, OUTAGE_SECONDS)
        else:
            self._fail(task, error)

    @staticmethod
    def _waited_too_long(task: Task) -> bool:
        """Returns whether a task has waited for a store for too long; the wait begins with the first call."""
        now = utc_now()
        task.unavailable_since = task.unavailable_since or now
        return now - task.unavailable_since > MAX_OUTAGE

    def _claimed(self, claim: Claim) -> Task | None:
        return self._tasks.claimed(claim.kind, claim.subject, claim.id)

    def _release(self, task: Task) -> None:
        task.attempts -= 1
        self._wait(task)

    def _wait(self, task: Task, why: str | None = None, pause: float = 0.0) -> None:
        """Returns a claimed task to the queue."""
        self._handlers[task.kind].wait(self._session, task.subject, why)
        self._enqueue(task, pause)

    def _enqueue(self, task: Task, pause: float) -> None:
        task.worker_id = task.claim_id = None
        self._session.flush()
        enqueue(self._session, task.kind, task.subject, delay=pause)

    def _fail(self, task: Task, error: MobizoError) -> None:
        try:
            with self._session.begin_nested():
                self._handlers[task.kind].fail(self._session, task.subject, error)
        except MobizoError:
            # The task ends all the same, so that it does not run for ever.
            _log.exception("task-not-marked-failed", kind=task.kind, subject=task.subject)
        self._session.delete(task)


def _too_large(memory_bytes: int, largest: int) -> str:
    return (
        f"compiling this takes about {memory_bytes:,} bytes of memory, and no machine with workers may give more than "
        f"{largest:,} (MOBIZO_COMPILE_BUDGET_BYTES); use a smaller base model or a larger machine"
    )
