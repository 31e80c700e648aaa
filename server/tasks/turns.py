"""How features request tasks. Each request adds a turn of its tenant: a DBOS workflow, in the caller's transaction.

Tenants take turns, separately for each kind of task, by start-time fair queueing: a turn's priority is its start tag.
So a thousand recipes of one tenant delay another tenant's first recipe by one compile at most. A turn runs the tenant's
waiting task of the highest priority, then of the oldest request; a turn that finds no waiting task does nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import Connection, create_engine
from sqlalchemy.orm import Session

from server.database.columns import new_id
from server.database.database import Database
from server.tasks.repository import UNFINISHED, Task, TaskRepository, TaskState

if TYPE_CHECKING:
    from dbos import DBOSClient, EnqueueOptions

TURN = "turn"  # the name of the DBOS workflow
APPLICATION = "mobizo"


@cache
def _client(dialect: str) -> DBOSClient:
    # Imported on first use, because most commands request no task and the import takes about a second.
    from dbos import DBOSClient

    # The client writes only in callers' transactions, so its own engine is never connected.
    engine = create_engine("postgresql+psycopg://" if dialect == "postgresql" else "sqlite://")
    return DBOSClient(system_database_engine=engine, application_name=APPLICATION, lazy=True)


def load_queue(database: Database) -> None:
    """Loads DBOS, so that the first transaction that enqueues a turn does not wait for its import."""
    _client(database.engine.dialect.name)


def enqueue_turn(session: Session | Connection, kind: str, tenant: str, tag: int, delay: float = 0.0) -> None:
    """Adds a turn in this transaction. delay: seconds until it may begin."""
    from dbos import WorkflowSerializationFormat

    options: EnqueueOptions = {
        "queue_name": kind,
        "workflow_name": TURN,
        "workflow_id": new_id("turn"),
        "priority": tag + 1,  # 1 is the smallest that DBOS accepts
        "serialization_type": WorkflowSerializationFormat.PORTABLE,
    }
    if delay > 0:
        options["delay_seconds"] = delay
    connection = session.connection() if isinstance(session, Session) else session
    _client(connection.dialect.name).enqueue_in_transaction(connection, options, kind, tenant, tag)


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
            task.error = None
        return task

    def request(self, kind: str, subject: str, requester: str, tenant: str, priority: int = 0) -> None:
        """Adds a tenant's request for a scheduled task. Tenants take turns; higher priorities go first."""
        task = self._tasks.get(kind, subject)
        if task is None:
            return
        if not self._tasks.is_requested(task, tenant):
            enqueue_turn(self._session, kind, tenant, self._tasks.next_tag(kind, tenant))
        self._tasks.add_request(task, requester, tenant, priority)

    def withdraw(self, requester: str) -> None:
        """Removes a request. A running task without requests is stopped at its next heartbeat."""
        self._tasks.remove_request(requester)

    def cancel(self, kind: str, subject: str) -> None:
        """Cancels a task that has not ended; its worker stops at its next heartbeat."""
        task = self._tasks.get_locked(kind, subject)
        if task is not None and task.state in UNFINISHED:
            self._tasks.end(task, TaskState.CANCELLED)
