"""Trajectories that devices sent.

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
    op.add_column("leases", sa.Column("trajectory_sha256", sa.String(64), nullable=True))
    op.add_column("leases", sa.Column("trajectory_size", sa.BigInteger(), nullable=True))
    op.create_index("ix_leases_trajectory_sha256", "leases", ["trajectory_sha256"])
    for name in ("verified", "by_ledger"):
        op.add_column("adapter_versions", sa.Column(name, sa.Boolean(), server_default=sa.false(), nullable=False))
    op.create_table(
        "trajectories",
        sa.Column("version_number", sa.Integer(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["version_number"], ["adapter_versions.number"], name="fk_trajectories_version_number", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("version_number", name="pk_trajectories"),
    )
    op.create_index("ix_trajectories_sha256", "trajectories", ["sha256"])
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


def downgrade() -> None:
    kept = op.get_bind().scalar(sa.text("SELECT count(*) FROM adapter_versions WHERE by_ledger"))
    if kept:
        raise RuntimeError(f"{kept} versions are kept as trajectories, which a release before this one cannot read")
    op.drop_table("trajectory_steps")
    op.drop_index("ix_trajectories_sha256", "trajectories")
    op.drop_table("trajectories")
    for name in ("by_ledger", "verified"):
        op.drop_column("adapter_versions", name)
    op.drop_index("ix_leases_trajectory_sha256", "leases")
    for name in ("trajectory_size", "trajectory_sha256"):
        op.drop_column("leases", name)
