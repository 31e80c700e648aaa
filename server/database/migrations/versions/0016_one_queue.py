"""DBOS holds which tasks wait: a waiting task is a workflow of its own, and requests and machines need no tables.

Running tasks are taken back by the first worker, because their workers send no heartbeats any more.

Revision ID: 0016
"""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import sqlalchemy as sa
from alembic import op
from dbos import DBOSClient, WorkflowSerializationFormat

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

ATTEMPTS = ("kind", "subject", "memory_bytes", "attempts", "unavailable_since", "worker_id", "claim_id")
WAITING = (
    "SELECT tasks.kind, tasks.subject, task_requests.tenant, min(task_requests.number) FROM tasks "
    "JOIN task_requests ON task_requests.task_number = tasks.number WHERE tasks.state = 'waiting' "
    "GROUP BY tasks.kind, tasks.subject, task_requests.tenant ORDER BY 4"
)


def upgrade() -> None:
    """Keeps the attempts of unfinished tasks, and enqueues each waiting one for each tenant that requests it."""
    connection = op.get_bind()
    waiting = connection.execute(sa.text(WAITING)).all()
    unfinished = connection.execute(
        sa.text(f"SELECT {', '.join(ATTEMPTS)} FROM tasks WHERE state IN ('waiting', 'running')")  # noqa: S608
    ).all()
    for table in ("task_requests", "tasks", "worker_hosts"):
        op.drop_table(table)
    with op.batch_alter_table("workers") as workers:
        workers.add_column(sa.Column("memory_bytes", sa.BigInteger(), server_default="0", nullable=False))
        workers.add_column(sa.Column("limited", sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "tasks",
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("unavailable_since", sa.DateTime()),
        sa.Column("worker_id", sa.String(64), sa.ForeignKey("workers.id", name="fk_tasks_worker_id")),
        sa.Column("claim_id", sa.String(64)),
        sa.PrimaryKeyConstraint("kind", "subject", name="pk_tasks"),
    )
    op.create_index("ix_tasks_worker_id", "tasks", ["worker_id"])
    tasks = sa.table("tasks", *(sa.column(name) for name in ATTEMPTS))
    for row in unfinished:
        connection.execute(sa.insert(tasks).values(**row._mapping))
    op.execute("DELETE FROM task_turns")
    schema = "dbos" if connection.dialect.name == "postgresql" else None
    if sa.inspect(connection).has_table("workflow_status", schema=schema):
        name: sa.ColumnClause[str] = sa.column("name")
        connection.execute(sa.delete(sa.table("workflow_status", name, schema=schema)).where(name == "turn"))
    _enqueue(connection, [(kind, subject, tenant) for kind, subject, tenant, _ in waiting])


def _enqueue(connection: sa.Connection, waiting: list[tuple[str, str, str]]) -> None:
    engine = sa.create_engine("postgresql+psycopg://" if connection.dialect.name == "postgresql" else "sqlite://")
    client = DBOSClient(system_database_engine=engine, application_name="mobizo", lazy=True)
    tags: dict[tuple[str, str], int] = {}
    for kind, subject, tenant in waiting:
        tag = tags.get((tenant, kind), 0)
        tags[tenant, kind] = tag + 1
        client.enqueue_in_transaction(
            connection,
            {
                "queue_name": kind,
                "workflow_name": "task",
                "workflow_id": f"task_{uuid4().hex}",
                "priority": tag + 1,
                "serialization_type": WorkflowSerializationFormat.PORTABLE,
            },
            kind,
            subject,
            tag,
            datetime.now(UTC).timestamp(),
        )
    turns = sa.table("task_turns", sa.column("tenant"), sa.column("kind"), sa.column("turn"))
    for (tenant, kind), tag in tags.items():
        connection.execute(sa.insert(turns).values(tenant=tenant, kind=kind, turn=tag))


def downgrade() -> None:
    """Restores the tables, empty."""
    op.drop_table("tasks")
    with op.batch_alter_table("workers") as workers:
        workers.drop_column("limited")
        workers.drop_column("memory_bytes")
    op.create_table(
        "worker_hosts",
        sa.Column("name", sa.String(255), primary_key=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("limited", sa.Boolean(), nullable=False),
        sa.Column("seen_at", sa.DateTime(), nullable=False),
    )
    op.create_table(
        "tasks",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("not_before", sa.DateTime()),
        sa.Column("unavailable_since", sa.DateTime()),
        sa.Column("worker_id", sa.String(64), sa.ForeignKey("workers.id", name="fk_tasks_worker_id")),
        sa.Column("claim_id", sa.String(64)),
        sa.Column("error", sa.Text()),
        sa.UniqueConstraint("kind", "subject", name="uq_tasks_kind"),
    )
    op.create_index("ix_tasks_state", "tasks", ["state", "number"])
    op.create_index("ix_tasks_worker_id", "tasks", ["worker_id"])
    task = sa.ForeignKey("tasks.number", name="fk_task_requests_task_number", ondelete="CASCADE")
    op.create_table(
        "task_requests",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("task_number", sa.Integer(), task, nullable=False),
        sa.Column("requester", sa.String(96), nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.UniqueConstraint("requester", name="uq_task_requests_requester"),
    )
    op.create_index(
        "ix_task_requests_order",
        "task_requests",
        ["tenant", "kind", sa.literal_column("priority DESC"), "number", "task_number"],
    )
    op.create_index("ix_task_requests_task_number", "task_requests", ["task_number"])
