"""The worker's side of the task queue: claim, heartbeat, release, retry, complete, fail.

The task table decides which task runs. A killed worker sends no heartbeats, and another worker claims its task once the
lease has expired. The result of a worker that lost its claim is dropped, so each task is published once. Locks are
taken in this order: the machine (claims only), the subject, the task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.settings import Settings
from server.tasks.handlers import Handler, Postponed
from server.tasks.repository import (
    UNFINISHED,
    Candidate,
    Task,
    TaskRepository,
    TaskState,
    WorkerHost,
    WorkerRepository,
    end,
)
from shared.errors import MobizoError
from shared.job import JobError

MOST_BACKOFF = timedelta(minutes=10)
HOST_LASTS = timedelta(minutes=5)  # a machine without a heartbeat for longer is ignored
OVERDUE = timedelta(minutes=10)  # smaller tasks do not overtake a large task that has waited for longer


class HostCapacity:
    """The memory of one worker's machine, locked until the transaction ends, so that workers there claim in turn."""

    def __init__(self, workers: WorkerRepository, worker_id: str, now: datetime) -> None:
        self._workers = workers
        self._now = now
        self.host: WorkerHost | None = workers.locked_host(worker_id)

    def most_bytes(self) -> float:
        """Returns the most memory of any machine for one task; infinite unless an operator limited all machines."""
        hosts = self._workers.hosts(self._now - HOST_LASTS)
        if self.host is None or any(not each.limited for each in hosts):
            return float("inf")
        return max((each.memory_bytes for each in hosts), default=self.host.memory_bytes)

    def is_possible(self, memory_bytes: int) -> bool:
        """Returns whether some machine may run a task of this size."""
        return memory_bytes <= self.most_bytes()

    def free_bytes(self) -> int:
        """Returns the memory that the running tasks leave; may be negative."""
        return 0 if self.host is None else self.host.memory_bytes - self._workers.used_bytes(self.host.name)

    def fits(self, memory_bytes: int) -> bool:
        """Returns whether a task of this size may begin on this machine now.

        Without an operator's limit a task of any size may run alone. A task of size 0 always fits.
        """
        if self.host is None or memory_bytes == 0:
            return True
        used = self._workers.used_bytes(self.host.name)
        return memory_bytes <= self.host.memory_bytes - used or (used == 0 and not self.host.limited)

    def is_overdue(self, memory_bytes: int, since: datetime) -> bool:
        """Returns whether a task that would fit here alone has waited so long that no smaller task may overtake it."""
        return self.host is not None and memory_bytes <= self.host.memory_bytes and self._now - since > OVERDUE


def backoff(settings: Settings, attempts: int) -> timedelta:
    """Returns the pause after a number of crashed attempts."""
    return min(timedelta(seconds=settings.compile_backoff_seconds * 2 ** (attempts - 1)), MOST_BACKOFF)


_MAX_DETAIL = 4000


@dataclass(frozen=True)
class Claim:
    """A task that a worker has claimed, and its order."""

    kind: str
    subject: str
    order: Any


class TaskQueue:
    """The queue for one worker, in one writing transaction. handlers: by kind of task."""

    def __init__(self, session: Session, settings: Settings, worker_id: str, handlers: Mapping[str, Handler]) -> None:
        self._session, self._settings, self._worker_id, self._handlers = session, settings, worker_id, handlers
        self._tasks, self._workers = TaskRepository(session), WorkerRepository(session)

    def claim(self) -> Claim | None:
        """Claims the next task that this worker's machine has memory for; returns None if there is none.

        A task fails here if its workers died too often or if no machine has enough memory.
        """
        now = utc_now()
        for task in self._tasks.lapsed(self._handlers, now):
            if self._lock(task) and self._tasks.lapsed_locked(task, now):
                self._end_lost_attempt(task)
        capacity = HostCapacity(self._workers, self._worker_id, now)
        while (candidate := self._next(capacity, now)) is not None:
            task, handler = candidate.task, self._handlers[candidate.task.kind]
            if not self._lock(task) or not self._tasks.startable_locked(task, now):
                continue
            if task.memory_bytes > (most := capacity.most_bytes()):
                self._fail(task, handler.too_large(task.memory_bytes, int(most)))
                continue
            try:
                order = handler.begin(self._session, task.subject)
            except Postponed as later:
                task.not_before = now + timedelta(seconds=later.seconds)
            except MobizoError as error:
                self._fail(task, error)
            else:
                self._tasks.took_turn(candidate.tenant, task.kind)
                task.state, task.worker_id, task.not_before = TaskState.RUNNING, self._worker_id, None
                task.attempts += 1
                self._extend(task)
                return Claim(task.kind, task.subject, order)
        return None

    def heartbeat(self, claim: Claim) -> bool:
        """Extends a claim. Returns False if the work must stop: the claim is lost, or the task has no requests."""
        task = self._claimed_task(claim)
        if task is None:
            return False
        if not self._tasks.is_requested(task):
            self._release(task)
            return False
        self._handlers[claim.kind].heartbeat(self._session, claim.order)
        self._extend(task)
        return True

    def complete(self, claim: Claim, result: Any) -> bool:
        """Publishes a result. Returns False without publishing if the claim is lost or the order is outdated."""
        task = self._claimed_task(claim, signs=True)
        if task is None:
            return False
        if not self._handlers[claim.kind].publish(self._session, claim.order, result):
            self._release(task)
            return False
        end(self._tasks, task, TaskState.DONE)
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
        remaining = self._settings.compile_attempts - task.attempts
        if remaining <= 0:
            self._fail(task, error)
            return
        pause = backoff(self._settings, task.attempts)
        self._wait(task, pause.total_seconds(), remaining)
        task.not_before = utc_now() + pause

    def release(self, claim: Claim) -> None:
        """Returns a task of a worker that stops to the queue; the attempt does not count."""
        task = self._claimed_task(claim)
        if task is not None:
            self._release(task)

    def take_back(self, task: Task, worker_id: str) -> None:
        """Takes a task from a worker whose process is dead, before its lease expires."""
        if self._lock(task) and (current := self._tasks.claimed_locked(task.kind, task.subject, worker_id)) is not None:
            self._end_lost_attempt(current)

    def _next(self, capacity: HostCapacity, now: datetime) -> Candidate | None:
        """Returns the next task, or the next one that fits in the free memory of the machine."""
        first = self._tasks.next(self._handlers, now)
        if first is None or capacity.fits(first.task.memory_bytes) or not capacity.is_possible(first.task.memory_bytes):
            return first
        # Smaller tasks must not overtake a task that would fit alone for ever.
        overdue = capacity.is_overdue(first.task.memory_bytes, first.since)
        return self._tasks.next(self._handlers, now, 0 if overdue else max(0, capacity.free_bytes()))

    def _lock(self, task: Task, *, signs: bool = False) -> bool:
        """Locks the subject of a task. If it no longer exists, cancels the task and returns False."""
        if self._handlers[task.kind].lock(self._session, task.subject, signs=signs):
            return True
        previous = self._tasks.get_locked(task.kind, task.subject)
        if previous is not None and previous.state in UNFINISHED:
            end(self._tasks, previous, TaskState.CANCELLED)
            self._session.flush()
        return False

    def _claimed_task(self, claim: Claim, *, signs: bool = False) -> Task | None:
        task = self._tasks.get(claim.kind, claim.subject)
        if task is None or not self._lock(task, signs=signs):
            return None
        return self._tasks.claimed_locked(claim.kind, claim.subject, self._worker_id)

    def _end_lost_attempt(self, task: Task) -> None:
        """Ends an attempt whose worker died. The attempt counts, because the task may have killed the worker."""
        remaining = self._settings.compile_attempts - task.attempts
        if remaining <= 0:
            self._fail(task, self._handlers[task.kind].killed())
        else:
            self._wait(task, None, remaining)

    def _release(self, task: Task) -> None:
        task.attempts -= 1
        self._wait(task, None, self._settings.compile_attempts - task.attempts)

    def _wait(self, task: Task, pause: float | None, attempts_left: int) -> None:
        task.state = TaskState.WAITING
        task.worker_id = task.lease_expires_at = None
        self._handlers[task.kind].wait(self._session, task.subject, pause, attempts_left)
        self._session.flush()

    def _fail(self, task: Task, error: MobizoError) -> None:
        task.error = JobError(code=error.code, detail=error.detail[:_MAX_DETAIL])
        self._handlers[task.kind].fail(self._session, task.subject, error)
        end(self._tasks, task, TaskState.FAILED)
        self._session.flush()

    def _extend(self, task: Task) -> None:
        task.lease_expires_at = utc_now() + timedelta(seconds=self._settings.compile_lease_seconds)
