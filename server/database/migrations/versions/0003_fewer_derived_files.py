"""Whole-model conversions and B after single steps are no longer made by the server: their tables and tasks go.

Revision ID: 0003
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

CONVERSION_TASKS = "SELECT number FROM tasks WHERE kind = 'conversion'"


def upgrade() -> None:
    """Removes tables and tasks. Garbage collection removes the files, which nothing references any more."""
    op.drop_table("trajectory_steps")
    op.drop_table("conversion_files")
    op.drop_table("conversions")
    op.execute(f"DELETE FROM task_requests WHERE task_number IN ({CONVERSION_TASKS})")  # noqa: S608 - a constant
    op.execute("DELETE FROM tasks WHERE kind = 'conversion'")
    op.execute("DELETE FROM task_turns WHERE kind = 'conversion'")


def downgrade() -> None:
    """Restores the tables, empty."""
    op.create_table(
        "conversions",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("form", sa.String(16), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ready_at", sa.DateTime(), nullable=True),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_conversions_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_conversions"),
        sa.UniqueConstraint("id", name="uq_conversions_id"),
        sa.UniqueConstraint("version_number", "form", name="uq_conversions_version_number"),
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
    op.create_table(
        "trajectory_steps",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"],
            ["trajectories.version_number"],
            name="fk_trajectory_steps_version_number",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("version_number", "step", name="pk_trajectory_steps"),
    )
