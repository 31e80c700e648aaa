"""Devices join with one-time tokens and people sign in with tokens: the requests that showed a code go.

Revision ID: 0011
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"


def upgrade() -> None:
    """Removes the tables. A device or program that waits for its code to be confirmed must begin again."""
    op.drop_table("device_requests")
    op.drop_table("login_requests")
