"""`main`, numbers and revisions name the versions of an adapter: tags go.

Revision ID: 0013
"""

from __future__ import annotations

from alembic import op

revision = "0013"
down_revision = "0012"


def upgrade() -> None:
    """Removes the table. The audit trail keeps which version had which tag."""
    op.drop_table("adapter_tags")
