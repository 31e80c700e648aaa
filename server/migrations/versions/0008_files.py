"""What the collection of unnamed files needs.

Revision ID: 0008
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


INDEXES = (("adapter_versions", "sha256"), ("peft_files", "sha256"), ("leases", "upload_sha256"))


def upgrade() -> None:
    made = op.create_table(
        "collections",
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=True),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("deleted", sa.BigInteger(), nullable=False),
        sa.Column("freed_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_collections"),
    )
    op.bulk_insert(made, [{"number": 1, "deleted": 0, "freed_bytes": 0}])
    for table, column in INDEXES:
        op.create_index(f"ix_{table}_{column}", table, [column])


def downgrade() -> None:
    for table, column in INDEXES:
        op.drop_index(f"ix_{table}_{column}", table)
    op.drop_table("collections")
