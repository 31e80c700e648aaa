"""The work queue moves to DBOS, and sweeps store their failures. Migration 0016 enqueues the waiting tasks.

Running tasks are taken back by the first worker, because their workers send no heartbeats any more.

Revision ID: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


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
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP SCHEMA IF EXISTS procrastinate CASCADE")
