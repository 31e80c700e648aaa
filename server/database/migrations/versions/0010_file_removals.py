"""Files are removed outside of transactions: meanwhile a row says that they must not be referenced.

Revision ID: 0010
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "file_removals",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("begun_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_file_removals"),
    )


def downgrade() -> None:
    op.drop_table("file_removals")
