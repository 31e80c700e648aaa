"""Requesting tasks. Features call this in the transaction that needs the work."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.tasks.repository import Task, TaskRepository, TaskState

_SCHEDULED = "mobizo-scheduled"  # the key in `Session.info`


def note_scheduled(session: Session, task: str) -> None:
    """Records the name of a task that waits for a worker, so that the engine announces it to workers."""
    session.info.setdefault(_SCHEDULED, set()).add(task)


def noted_scheduled(session: Session) -> list[str]:
    """Returns the names recorded in this transaction, sorted, and clears the record."""
    names: set[str] = session.info.pop(_SCHEDULED, set())
    return sorted(names)


UNFINISHED = (TaskState.WAITING, TaskState.RUNNING)


class TaskService:
    """Tasks and their requests in one transaction. Lock a task's subject before calling `schedule` or `cancel`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._tasks = TaskRepository(session)

    def schedule(self, kind: str, subject: str, memory_bytes: int = 0) -> Task:
        """Schedules the task of a subject and returns it. A task that has ended starts over.

        memory_bytes: the estimated peak memory. The task runs only while a request for it exists.
        """
        task = self._tasks.ensure(kind, subject, memory_bytes)
        if task.state not in UNFINISHED:
            task.state, task.memory_bytes, task.attempts = TaskState.WAITING, memory_bytes, 0
            task.not_before = task.error = None
        note_scheduled(self._session, task.name)
        return task

    def request(self, kind: str, subject: str, requester: str, tenant: str, priority: int = 0) -> None:
        """Adds a tenant's request for a scheduled task. Tenants take turns; higher priorities go first."""
        task = self._tasks.get(kind, subject)
        if task is not None:
            self._tasks.add_request(task, requester, tenant, priority, utc_now())

    def withdraw(self, requester: str) -> None:
        """Removes a request. A running task without requests is stopped at its next heartbeat."""
        self._tasks.remove_request(requester)

    def cancel(self, kind: str, subject: str) -> None:
        """Cancels a task that has not ended; its worker stops at its next heartbeat."""
        task = self._tasks.get_locked(kind, subject)
        if task is not None and task.state in UNFINISHED:
            end(self._tasks, task, TaskState.CANCELLED)


def end(tasks: TaskRepository, task: Task, state: TaskState) -> None:
    """Ends a locked task and removes all its requests."""
    task.state = state
    task.worker_id = task.lease_expires_at = task.not_before = None
    tasks.remove_requests(task)
