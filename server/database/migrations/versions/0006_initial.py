"""The first schema, which later migrations change. A new database gets its tables from `server.schema` instead.

Revision ID: 0006
"""

from __future__ import annotations

revision = "0006"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass


def downgrade() -> None:
    pass
