"""How features request tasks: a task is a DBOS workflow, enqueued in the caller's transaction.

Tenants take turns, separately for each kind of task, by start-time fair queueing: a task's priority is its start tag.
So a thousand recipes of one tenant delay another tenant's first recipe by one compile at most. A subject may be
requested several times: a task whose subject waits for no worker any more does nothing.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from server.database.columns import new_id, utc_now
from server.database.database import Database
from server.tasks.repository import TaskRepository

if TYPE_CHECKING:
    from dbos import DBOSClient, EnqueueOptions

TASK = "task"  # the name of the DBOS workflow
APPLICATION = "mobizo"
FIRST = 0  # the start tag of a task that had its turn before


@cache
def _client(dialect: str) -> DBOSClient:
    # Imported on first use, because most commands request no task and the import takes about a second.
    from dbos import DBOSClient

    # The client writes only in callers' transactions, so its own engine is never connected.
    engine = create_engine("postgresql+psycopg://" if dialect == "postgresql" else "sqlite://")
    return DBOSClient(system_database_engine=engine, application_name=APPLICATION, lazy=True)


def load_queue(database: Database) -> None:
    """Loads DBOS, so that the first transaction that enqueues a task does not wait for its import."""
    _client(database.engine.dialect.name)


def request_task(session: Session, kind: str, subject: str, tenant: str) -> None:
    """Requests the task of a subject in the tenant's next turn."""
    enqueue(session, kind, subject, TaskRepository(session).next_tag(kind, tenant))


def enqueue(
    session: Session, kind: str, subject: str, tag: int = FIRST, *, since: float | None = None, delay: float = 0.0
) -> None:
    """Enqueues a task in this transaction.

    since: when it began to wait for memory, seconds since 1970; None: now. delay: seconds until it may begin.
    """
    from dbos import WorkflowSerializationFormat

    options: EnqueueOptions = {
        "queue_name": kind,
        "workflow_name": TASK,
        "workflow_id": new_id("task"),
        "priority": tag + 1,  # 1 is the smallest that DBOS accepts
        "serialization_type": WorkflowSerializationFormat.PORTABLE,
    }
    if delay > 0:
        options["delay_seconds"] = delay
    since = utc_now().timestamp() if since is None else since
    connection = session.connection()
    _client(connection.dialect.name).enqueue_in_transaction(connection, options, kind, subject, tag, since)
