"""Cohorts, their members, rounds and updates; adapter versions that no single job made.

Operators' tokens that could do everything can do what is new; apps' stay as they are, and a new one can do more.

Revision ID: 0014
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

_SOURCE = ("job_id", "device_id")
_HERE = sa.text("left_at IS NULL")
_OPEN = sa.text("state = 'open'")
_UNDER_WAY = sa.text("state IN ('open', 'aggregating')")
_NEXT = sa.text("opens AND NOT busy")


def upgrade() -> None:
    op.add_column("jobs", sa.Column("round", sa.Text(), nullable=True))
    op.add_column("leases", sa.Column("upload_norm", sa.Float(), nullable=True))
    with op.batch_alter_table("adapter_versions") as versions:
        for name in _SOURCE:
            versions.alter_column(name, existing_type=sa.String(64), nullable=True)
    op.execute(
        "UPDATE tokens SET scopes = replace(scopes, 'adapters:write', 'adapters:write cohorts:read cohorts:write') "
        "WHERE role = 'operator' AND scopes LIKE 'adapters:read adapters:score adapters:write devices:read "
        "devices:write jobs:read jobs:write%tokens:write'"
    )
    op.create_table(
        "cohorts",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("tenant", sa.String(96), nullable=False),
        sa.Column("name", sa.String(96), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("recipe_id", sa.String(64), nullable=False),
        sa.Column("shape", sa.Text(), nullable=False),
        sa.Column("a_sha256", sa.String(64), nullable=False),
        sa.Column("size_d", sa.BigInteger(), nullable=False),
        sa.Column("rounds", sa.Integer(), nullable=False),
        sa.Column("opens", sa.Boolean(), nullable=False),
        sa.Column("busy", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.DateTime(), nullable=False),
        sa.PrimaryKeyConstraint("number", name="pk_cohorts"),
        sa.UniqueConstraint("tenant", "name", name="uq_cohorts_tenant"),
    )
    op.create_index("ix_cohorts_tenant", "cohorts", ["tenant", "number"])
    op.create_index("ix_cohorts_next", "cohorts", ["number"], sqlite_where=_NEXT, postgresql_where=_NEXT)
    op.create_table(
        "cohort_members",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("cohort_number", sa.Integer(), nullable=False),
        sa.Column("user", sa.String(96), nullable=False),
        sa.Column("device_id", sa.String(64), nullable=False),
        sa.Column("joined_at", sa.DateTime(), nullable=False),
        sa.Column("left_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["cohort_number"], ["cohorts.number"], name="fk_cohort_members_cohort_number"),
        sa.ForeignKeyConstraint(["device_id"], ["devices.id"], name="fk_cohort_members_device_id"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_members"),
        sa.UniqueConstraint("cohort_number", "user", name="uq_cohort_members_cohort_number"),
    )
    op.create_index("ix_cohort_members_cohort", "cohort_members", ["cohort_number", "number"])
    op.create_index("ix_cohort_members_of_device", "cohort_members", ["device_id", "cohort_number"])
    op.create_index(
        "ix_cohort_members_device",
        "cohort_members",
        ["cohort_number", "device_id"],
        unique=True,
        sqlite_where=_HERE,
        postgresql_where=_HERE,
    )
    _create_rounds()
    _create_updates()


def _create_rounds() -> None:
    op.create_table(
        "cohort_rounds",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("cohort_number", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.Column("start", sa.Text(), nullable=True),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("version", sa.Integer(), nullable=True),
        sa.Column("members", sa.Integer(), nullable=False),
        sa.Column("updates", sa.Integer(), nullable=False),
        sa.Column("optimizer_sha256", sa.String(64), nullable=True),
        sa.Column("opened_at", sa.DateTime(), nullable=False),
        sa.Column("deadline", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("worker_id", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("next_attempt_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["cohort_number"], ["cohorts.number"], name="fk_cohort_rounds_cohort_number"),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name="fk_cohort_rounds_worker_id"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_rounds"),
        sa.UniqueConstraint("id", name="uq_cohort_rounds_id"),
        sa.UniqueConstraint("cohort_number", "position", name="uq_cohort_rounds_cohort_number"),
    )
    op.create_index("ix_cohort_rounds_cohort", "cohort_rounds", ["cohort_number", "number"])
    op.create_index(
        "ix_cohort_rounds_open",
        "cohort_rounds",
        ["cohort_number"],
        unique=True,
        sqlite_where=_OPEN,
        postgresql_where=_OPEN,
    )
    op.create_index(
        "ix_cohort_rounds_state",
        "cohort_rounds",
        ["state", "number"],
        sqlite_where=_UNDER_WAY,
        postgresql_where=_UNDER_WAY,
    )
    for column in ("start_sha256", "optimizer_sha256"):
        op.create_index(f"ix_cohort_rounds_{column}", "cohort_rounds", [column])


def _create_updates() -> None:
    op.create_table(
        "cohort_updates",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("round_number", sa.Integer(), nullable=False),
        sa.Column("member_number", sa.Integer(), nullable=False),
        sa.Column("job_number", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("start_version", sa.Integer(), nullable=True),
        sa.Column("start_sha256", sa.String(64), nullable=True),
        sa.Column("sha256", sa.String(64), nullable=True),
        sa.Column("sent_bytes", sa.BigInteger(), nullable=True),
        sa.Column("claimed_examples", sa.BigInteger(), nullable=True),
        sa.Column("examples", sa.BigInteger(), nullable=True),
        sa.Column("norm", sa.Float(), nullable=True),
        sa.Column("staleness", sa.Integer(), nullable=True),
        sa.Column("start_accuracy", sa.Float(), nullable=True),
        sa.Column("tuned_accuracy", sa.Float(), nullable=True),
        sa.Column("updated_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["round_number"], ["cohort_rounds.number"], name="fk_cohort_updates_round_number"),
        sa.ForeignKeyConstraint(["member_number"], ["cohort_members.number"], name="fk_cohort_updates_member_number"),
        sa.ForeignKeyConstraint(["job_number"], ["jobs.number"], name="fk_cohort_updates_job_number"),
        sa.PrimaryKeyConstraint("number", name="pk_cohort_updates"),
        sa.UniqueConstraint("round_number", "member_number", name="uq_cohort_updates_round_number"),
        sa.UniqueConstraint("job_number", name="uq_cohort_updates_job_number"),
    )
    op.create_index("ix_cohort_updates_round", "cohort_updates", ["round_number", "state", "number"])
    for column in ("member_number", "start_sha256", "sha256"):
        op.create_index(f"ix_cohort_updates_{column}", "cohort_updates", [column])


def downgrade() -> None:
    made = op.get_bind().scalar(sa.text("SELECT count(*) FROM adapter_versions WHERE job_id IS NULL"))
    if made:
        raise RuntimeError(f"{made} adapter versions were made by cohorts, which a release before this one cannot read")
    for table in ("cohort_updates", "cohort_rounds", "cohort_members", "cohorts"):
        op.drop_table(table)
    with op.batch_alter_table("adapter_versions") as versions:
        for name in _SOURCE:
            versions.alter_column(name, existing_type=sa.String(64), nullable=False)
    op.drop_column("leases", "upload_norm")
    op.drop_column("jobs", "round")
