"""Webhooks and their deliveries.

Revision ID: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

WAITING = sa.text("state = 'waiting'")


def upgrade() -> None:
    """Creates the tables."""
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("events", sa.JSON(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("due_at", sa.DateTime(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("failing_since", sa.DateTime(), nullable=True),
        sa.Column("disabled_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_webhooks_tenant"),
        sa.PrimaryKeyConstraint("number", name="pk_webhooks"),
        sa.UniqueConstraint("id", name="uq_webhooks_id"),
    )
    op.create_index("ix_webhooks_tenant", "webhooks", ["tenant", "number"])
    of_webhook = sa.ForeignKeyConstraint(
        ["webhook_number"], ["webhooks.number"], name="fk_webhook_deliveries_webhook_number", ondelete="CASCADE"
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("webhook_number", sa.Integer(), nullable=False),
        sa.Column("event", sa.String(64), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("due_at", sa.DateTime(), nullable=False),
        sa.Column("attempted_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        of_webhook,
        sa.PrimaryKeyConstraint("number", name="pk_webhook_deliveries"),
        sa.UniqueConstraint("id", name="uq_webhook_deliveries_id"),
    )
    op.create_index("ix_webhook_deliveries_webhook", "webhook_deliveries", ["webhook_number", "number"])
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["webhook_number", "due_at"],
        sqlite_where=WAITING,
        postgresql_where=WAITING,
    )


def downgrade() -> None:
    """Removes the tables with all webhooks."""
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
