"""What private jobs spend of users' privacy, and users' budgets.

Operators' tokens that could do everything can set budgets, too.

Revision ID: 0016
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "privacy_spendings",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("cohort", sa.String(96), nullable=True),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=True),
        sa.Column("sampling_rate", sa.Float(), nullable=False),
        sa.Column("noise_multiplier", sa.Float(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("spent_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_privacy_spendings_job_id"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_privacy_spendings_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_privacy_spendings"),
        sa.UniqueConstraint("job_id", "device_id", name="uq_privacy_spendings_job_id"),
    )
    op.create_index("ix_privacy_spendings_user", "privacy_spendings", ["tenant", "user", "number"])
    op.create_index("ix_privacy_spendings_cohort", "privacy_spendings", ["tenant", "cohort", "user"])
    op.create_table(
        "privacy_limits",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("epsilon", sa.Float(), nullable=True),
        sa.Column("delta", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_privacy_limits"),
        sa.UniqueConstraint("tenant", "user", name="uq_privacy_limits_tenant"),
    )
    op.execute(
        "UPDATE tokens SET scopes = replace(scopes, 'jobs:read jobs:write', 'jobs:read jobs:write privacy:write') "
        "WHERE role = 'operator' AND scopes LIKE '%adapters:write cohorts:read cohorts:write devices:read "
        "devices:write jobs:read jobs:write%tokens:write'"
    )


def downgrade() -> None:
    op.execute("UPDATE tokens SET scopes = replace(scopes, ' privacy:write', '')")
    op.drop_table("privacy_limits")
    op.drop_table("privacy_spendings")
