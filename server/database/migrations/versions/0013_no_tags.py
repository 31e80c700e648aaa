"""`main`, numbers and revisions name the versions of an adapter: tags go.

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
    """Removes the table. The audit trail keeps which version had which tag."""
    op.drop_table("adapter_tags")


def downgrade() -> None:
    """Restores the table, empty."""
    adapter = sa.ForeignKey("adapters.number", name="fk_adapter_tags_adapter_number", ondelete="CASCADE")
    version = sa.ForeignKey("adapter_versions.number", name="fk_adapter_tags_version_number", ondelete="CASCADE")
    op.create_table(
        "adapter_tags",
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("adapter_number", sa.Integer(), adapter, nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("version_number", sa.Integer(), version, nullable=False, index=True),
        sa.Column("moved_at", sa.DateTime(), nullable=False),
        sa.UniqueConstraint("adapter_number", "name", name="uq_adapter_tags_adapter_number"),
    )
