"""Drops the builds of the native runner, which is installed as a package instead.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drops the table. Garbage collection removes the archives, which nothing references any more."""
    op.drop_table("runners")


def downgrade() -> None:
    """Creates the table, empty."""
    op.create_table(
        "runners",
        sa.Column("platform", sa.String(100), nullable=False),
        sa.Column("signed", sa.Text(), nullable=False),
        sa.Column("added_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_runners"),
        sa.UniqueConstraint("platform", name="uq_runners_platform"),
    )
