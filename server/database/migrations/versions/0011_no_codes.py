"""Devices join with one-time tokens and people sign in with tokens: the requests that showed a code go.

Revision ID: 0011
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Removes the tables. A device or program that waits for its code to be confirmed must begin again."""
    op.drop_table("device_requests")
    op.drop_table("login_requests")


def downgrade() -> None:
    """Restores the tables, empty."""
    _create(
        "device_requests",
        sa.Column("user_code", sa.String(16), nullable=False, unique=True),
        sa.Column("public_key", sa.String(100), nullable=False),
        sa.Column("platform", sa.String(200), nullable=False),
        sa.Column("device_id", sa.String(64), sa.ForeignKey("devices.id", name="fk_device_requests_device_id")),
        sa.Column("users", sa.Text(), server_default="[]", nullable=False),
    )
    _create(
        "login_requests",
        sa.Column("user_code_digest", sa.String(64), nullable=False, unique=True),
        sa.Column("scopes", sa.Text(), nullable=False),
    )


def _create(table: str, *columns: sa.Column[Any]) -> None:
    """Creates a table of requests with a device code. columns: those that only this table has."""
    op.create_table(
        table,
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("device_code_digest", sa.String(64), nullable=False, unique=True),
        sa.Column("client_id", sa.String(100), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("address", sa.String(64), nullable=False, index=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("interval_seconds", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("expires_at", sa.DateTime(), nullable=False, index=True),
        sa.Column("polled_at", sa.DateTime()),
        sa.Column("tenant", sa.String(96)),
        sa.Column("decided_by", sa.String(64)),
        sa.Column("decided_at", sa.DateTime()),
        *columns,
    )
