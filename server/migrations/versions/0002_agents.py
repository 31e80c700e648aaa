"""What the device agent's issue needs: declined recipes, runner builds, revoked devices.

Revision ID: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("revoked_at", sa.DateTime(), nullable=True))
    op.add_column("leases", sa.Column("memory_bytes", sa.BigInteger(), nullable=True))
    op.create_table(
        "declines",
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("needed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("available_bytes", sa.BigInteger(), nullable=False),
        sa.Column("enough_bytes", sa.BigInteger(), nullable=False),
        sa.Column("declined_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_declines_device_id"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_declines_job_number"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_declines_recipe_id"),
        sa.PrimaryKeyConstraint("device_id", "recipe_id", name="pk_declines"),
    )
    op.create_table(
        "runners",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("platform", sa.String(length=100), nullable=False),
        sa.Column("signed", sa.Text(), nullable=False),
        sa.Column("added_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_runners"),
        sa.UniqueConstraint("platform", name="uq_runners_platform"),
    )


def downgrade() -> None:
    op.drop_table("runners")
    op.drop_table("declines")
    op.drop_column("leases", "memory_bytes")
    op.drop_column("devices", "revoked_at")
