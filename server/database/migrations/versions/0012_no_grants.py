"""A device may download the adapters of its users: the grants of single adapters go.

Revision ID: 0012
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Removes the table. An adapter that was granted reaches the device once the adapter's user is bound to it."""
    op.drop_table("adapter_grants")


def downgrade() -> None:
    """Restores the table, empty."""
    adapter = sa.ForeignKey("adapters.number", name="fk_adapter_grants_adapter_number", ondelete="CASCADE")
    op.create_table(
        "adapter_grants",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("adapter_number", sa.Integer(), adapter, nullable=False),
        sa.Column("device_id", sa.String(64), sa.ForeignKey("devices.id"), nullable=False),
        sa.Column("granted_at", sa.DateTime(), nullable=False),
        sa.UniqueConstraint("adapter_number", "device_id", name="uq_adapter_grants_adapter_number"),
    )
    op.create_index("ix_adapter_grants_device", "adapter_grants", ["device_id", "adapter_number"])
    op.create_index("ix_adapter_grants_adapter", "adapter_grants", ["adapter_number", "number"])
