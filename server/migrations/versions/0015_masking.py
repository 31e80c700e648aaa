"""Masked rounds and the devices in them.

Revision ID: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "masked_rounds",
        sa.Column("round_number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("phase_seconds", sa.Float(), nullable=False),
        sa.Column("least", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("closes_at", sa.DateTime(), nullable=True),
        sa.Column("why", sa.Text(), nullable=True),
        sa.Column("roster", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["round_number"], ["cohort_rounds.number"], name="fk_masked_rounds_round_number"),
        sa.PrimaryKeyConstraint("round_number", name="pk_masked_rounds"),
    )
    op.create_index("ix_masked_rounds_closes_at", "masked_rounds", ["closes_at"])
    op.create_table(
        "masked_members",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("member", sa.String(64), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=True),
        sa.Column("reached", sa.String(16), nullable=False),
        sa.Column("advertisement", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=True),
        sa.Column("commitment", sa.LargeBinary(), nullable=True),
        sa.Column("vector_sha256", sa.String(64), nullable=True),
        sa.Column("signature", sa.LargeBinary(), nullable=True),
        sa.Column("seeds", sa.LargeBinary(), nullable=True),
        sa.Column("keys", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(
            ["round_number"], ["masked_rounds.round_number"], name="fk_masked_members_round_number"
        ),
        sa.ForeignKeyConstraint(["member"], ["devices.id"], name="fk_masked_members_member"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_masked_members_job_number"),
        sa.PrimaryKeyConstraint("number", name="pk_masked_members"),
    )
    op.create_index("ix_masked_members_round", "masked_members", ["round_number", "member"], unique=True)
    for column in ("job_number", "vector_sha256"):
        op.create_index(f"ix_masked_members_{column}", "masked_members", [column])


def downgrade() -> None:
    op.drop_table("masked_members")
    op.drop_table("masked_rounds")
