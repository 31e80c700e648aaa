"""Requests that were answered once, for their repetition.

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
    op.create_table(
        "kept_answers",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("fingerprint", sa.String(length=64), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        sa.Column("kept_until", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_kept_answers"),
        sa.UniqueConstraint("id", name="uq_kept_answers_id"),
    )
    op.create_index("ix_kept_answers_kept_until", "kept_answers", ["kept_until"])


def downgrade() -> None:
    op.drop_table("kept_answers")
