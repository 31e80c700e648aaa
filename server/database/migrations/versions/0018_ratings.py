"""Ratings of texts that versions wrote on the page "Try it".

Revision ID: 0018
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Creates the table, empty."""
    op.create_table(
        "ratings",
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("prompt", sa.Text(), nullable=False),
        sa.Column("completion", sa.Text(), nullable=False),
        sa.Column("label", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_ratings_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("number", name="pk_ratings"),
    )
    op.create_index("ix_ratings_tenant", "ratings", ["tenant"])
    op.create_index("ix_ratings_version_number", "ratings", ["version_number"])


def downgrade() -> None:
    """Removes the ratings."""
    op.drop_table("ratings")
