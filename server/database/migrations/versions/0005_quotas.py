"""Tenants have quotas, the bytes that their adapter versions store are counted, and old leases are removed.

Revision ID: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

OLD = "leases WHERE job_number IN (SELECT number FROM jobs WHERE purged)"


def upgrade() -> None:
    """Adds the columns and counts what is stored."""
    op.add_column("tenants", sa.Column("quotas", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("tenants", sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("adapter_versions", sa.Column("stored_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute(
        "UPDATE adapter_versions SET stored_bytes = size + coalesce("
        "(SELECT t.size FROM trajectories t WHERE t.version_number = adapter_versions.number), 0)"
    )
    op.execute(
        "UPDATE tenants SET stored_bytes = coalesce((SELECT sum(v.stored_bytes) FROM adapter_versions v "
        "JOIN adapters a ON a.number = v.adapter_number WHERE a.tenant = tenants.name), 0)"
    )
    op.create_table(
        "purged_leases",
        sa.Column("ending", sa.String(16), nullable=False),
        sa.Column("leases", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("ending", name="pk_purged_leases"),
    )
    # Jobs whose events were removed before; later, leases are removed with the events.
    op.execute(f"INSERT INTO purged_leases SELECT ending, count(*) FROM {OLD} GROUP BY ending")  # noqa: S608 - constants
    op.execute(f"INSERT INTO purged_leases SELECT 'reassigned', count(*) - count(DISTINCT job_number) FROM {OLD}")  # noqa: S608
    op.execute(f"DELETE FROM {OLD}")  # noqa: S608


def downgrade() -> None:
    """Removes the columns and the table."""
    op.drop_table("purged_leases")
    op.drop_column("adapter_versions", "stored_bytes")
    op.drop_column("tenants", "stored_bytes")
    op.drop_column("tenants", "quotas")
