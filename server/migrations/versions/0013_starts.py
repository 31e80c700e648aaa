"""The adapter version that a job goes on from, and which adapters devices were assigned.

Revision ID: 0013
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("start", sa.Text(), nullable=True))
    op.create_table(
        "adapter_assignments",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("adapter_number", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(length=64), nullable=False),
        sa.Column("assigned_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["adapter_number"], ["adapters.number"], name="fk_adapter_assignments_adapter_number", ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_adapter_assignments_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_adapter_assignments"),
        sa.UniqueConstraint("adapter_number", "device_id", name="uq_adapter_assignments_adapter_number"),
    )
    op.create_index("ix_adapter_assignments_device", "adapter_assignments", ["device_id", "adapter_number"])
    op.create_index("ix_adapter_assignments_adapter", "adapter_assignments", ["adapter_number", "number"])
    op.create_index("ix_adapter_versions_device", "adapter_versions", ["device_id", "adapter_number"])


def downgrade() -> None:
    op.drop_index("ix_adapter_versions_device", table_name="adapter_versions")
    op.drop_table("adapter_assignments")
    op.drop_column("jobs", "start")
