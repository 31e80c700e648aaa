"""Calibrations that recipes may take A from.

Revision ID: 0017
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "calibrations",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("base_number", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("task", sa.String(length=200), nullable=False),
        sa.Column("examples", sa.BigInteger(), nullable=False),
        sa.Column("modules", sa.Integer(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["base_number"], ["bases.number"], name="fk_calibrations_base_number"),
        sa.PrimaryKeyConstraint("number", name="pk_calibrations"),
        sa.UniqueConstraint("sha256", name="uq_calibrations_sha256"),
    )


def downgrade() -> None:
    op.drop_table("calibrations")
