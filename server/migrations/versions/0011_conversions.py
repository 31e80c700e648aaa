"""Conversions that workers make, and the files that came of them.

Revision ID: 0011
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "conversions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("worker_id", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.Column("next_attempt_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_conversions_version_number", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_conversions_worker_id"),
        sa.PrimaryKeyConstraint("number", name="pk_conversions"),
        sa.UniqueConstraint("id", name="uq_conversions_id"),
        sa.UniqueConstraint("version_number", name="uq_conversions_version_number"),
    )
    op.create_index("ix_conversions_state", "conversions", ["state"])
    op.create_table(
        "conversion_files",
        sa.Column("conversion_number", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(100), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.ForeignKeyConstraint(
            ["conversion_number"],
            ["conversions.number"],
            name="fk_conversion_files_conversion_number",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("conversion_number", "path", name="pk_conversion_files"),
    )
    op.create_index("ix_conversion_files_sha256", "conversion_files", ["sha256"])


def downgrade() -> None:
    op.drop_table("conversion_files")
    op.drop_table("conversions")
