"""A device may download the adapters of its users: the grants of single adapters go.

Revision ID: 0012
"""

from __future__ import annotations

from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Removes the table. An adapter that was granted reaches the device once the adapter's user is bound to it."""
    op.drop_table("adapter_grants")
