"""Drops the builds of the native runner, which is installed as a package instead.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Drops the table. Garbage collection removes the archives, which nothing references any more."""
    op.drop_table("runners")
