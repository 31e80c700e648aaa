"""The work queue moves to DBOS: each tenant that waits for a task gets a turn, and sweeps store their failures.

Running tasks are taken back by the first worker, because their workers send no heartbeats any more.

Revision ID: 0004
"""

from __future__ import annotations

from uuid import uuid4

import sqlalchemy as sa
from alembic import op
from dbos import DBOSClient, WorkflowSerializationFormat

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("tasks") as table:
        table.drop_column("lease_expires_at")
        table.add_column(sa.Column("unavailable_since", sa.DateTime(), nullable=True))
        table.add_column(sa.Column("claim_id", sa.String(64), nullable=True))
    op.execute("UPDATE tasks SET claim_id = worker_id WHERE state = 'running'")
    op.drop_index("ix_task_turns_turn", "task_turns")
    op.execute("DELETE FROM task_turns")
    op.create_table(
        "sweep_failures",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(200), nullable=False),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("failed_at", sa.DateTime(), nullable=False),
        sa.Column("not_before", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("name", "subject", name="pk_sweep_failures"),
    )
    _add_turns(op.get_bind())
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP SCHEMA IF EXISTS procrastinate CASCADE")


def _add_turns(connection: sa.Connection) -> None:
    """Adds the turn of each tenant that requests a waiting task, in the order of the requests."""
    waiting = connection.execute(
        sa.text(
            "SELECT task_requests.tenant, task_requests.kind, min(task_requests.number) FROM task_requests "
            "JOIN tasks ON tasks.number = task_requests.task_number WHERE tasks.state = 'waiting' "
            "GROUP BY task_requests.tenant, task_requests.kind, tasks.number ORDER BY 3"
        )
    ).all()
    engine = sa.create_engine("postgresql+psycopg://" if connection.dialect.name == "postgresql" else "sqlite://")
    client = DBOSClient(system_database_engine=engine, application_name="mobizo", lazy=True)
    tags: dict[tuple[str, str], int] = {}
    for tenant, kind, _ in waiting:
        tag = tags.get((tenant, kind), 0)
        tags[tenant, kind] = tag + 1
        client.enqueue_in_transaction(
            connection,
            {
                "queue_name": kind,
                "workflow_name": "turn",
                "workflow_id": f"turn_{uuid4().hex}",
                "priority": tag + 1,
                "serialization_type": WorkflowSerializationFormat.PORTABLE,
            },
            kind,
            tenant,
            tag,
        )
    turns = sa.table("task_turns", sa.column("tenant"), sa.column("kind"), sa.column("turn"))
    for (tenant, kind), tag in tags.items():
        connection.execute(sa.insert(turns).values(tenant=tenant, kind=kind, turn=tag))


def downgrade() -> None:
    op.drop_table("sweep_failures")
    op.create_index("ix_task_turns_turn", "task_turns", ["turn"])
    with op.batch_alter_table("tasks") as table:
        table.drop_column("claim_id")
        table.drop_column("unavailable_since")
        table.add_column(sa.Column("lease_expires_at", sa.DateTime(), nullable=True))
    # The former release takes tasks without a lease from no worker, so they wait again.
    op.execute("UPDATE tasks SET state = 'waiting', worker_id = NULL WHERE state = 'running'")
    tenants = "SELECT DISTINCT tenant, kind, 0 FROM task_requests WHERE true ON CONFLICT DO NOTHING"
    op.execute("DELETE FROM task_turns")
    op.execute(f"INSERT INTO task_turns (tenant, kind, turn) {tenants}")
