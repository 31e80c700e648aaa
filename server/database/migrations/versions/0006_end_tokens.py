"""Each base model has the tokens that end its texts; those of earlier releases get them when they are added again.

Revision ID: 0006
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("bases", sa.Column("end_tokens", sa.JSON(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("bases") as table:
        table.drop_column("end_tokens")
