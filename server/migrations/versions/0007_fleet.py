"""What devices can do and what jobs ask of them; the queue's lanes and turns.

Revision ID: 0007
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("devices", sa.Column("labels", sa.Text(), nullable=False, server_default="{}"))
    op.add_column("devices", sa.Column("told", sa.Text(), nullable=True))
    op.add_column("devices", sa.Column("failures", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("devices", sa.Column("rests_until", sa.DateTime(), nullable=True))
    op.add_column("leases", sa.Column("seconds", sa.Float(), nullable=True))
    op.create_index("ix_leases_job", "leases", ["job_number", "number"])
    op.create_index(
        "ix_leases_expiry",
        "leases",
        ["expires_at"],
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.create_table(
        "lanes",
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("dataset", sa.String(length=96), nullable=False),
        sa.Column("only_device_id", sa.String(length=64), nullable=True),
        sa.Column("recipe_id", sa.String(length=64), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("needs", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["only_device_id"], ["devices.id"], name="fk_lanes_only_device_id"),
        sa.ForeignKeyConstraint(["recipe_id"], ["programs.recipe_id"], name="fk_lanes_recipe_id"),
        sa.PrimaryKeyConstraint("number", name="pk_lanes"),
        sa.UniqueConstraint("key", name="uq_lanes_key"),
    )
    op.create_index("ix_lanes_dataset", "lanes", ["tenant", "dataset", "only_device_id"])
    op.create_table(
        "turns",
        sa.Column("tenant", sa.String(length=96), nullable=False),
        sa.Column("user", sa.String(length=96), nullable=False),
        sa.Column("turn", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "user", name="pk_turns"),
    )
    # No foreign key: SQLite can add one only by making the whole table anew. Lanes are never removed.
    op.add_column("jobs", sa.Column("turn", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("jobs", sa.Column("lane_number", sa.Integer(), nullable=True))
    op.create_index("ix_jobs_lane", "jobs", ["lane_number", "turn", "number"])
    _line_up_who_waits()


def _line_up_who_waits() -> None:
    """Jobs that are ready already keep their order, and ask for no more of a device than they did so far."""
    connection = op.get_bind()
    # The key is none that a new job could have.
    connection.execute(
        sa.text(
            "INSERT INTO lanes (key, tenant, dataset, only_device_id, recipe_id, priority, needs) "
            "SELECT 'before-0007-' || min(number), tenant, dataset, only_device_id, recipe_id, 0, '{}' FROM jobs "
            "WHERE state = 'ready' GROUP BY tenant, dataset, only_device_id, recipe_id"
        )
    )
    connection.execute(
        sa.text(
            "UPDATE jobs SET lane_number = (SELECT lanes.number FROM lanes WHERE lanes.tenant = jobs.tenant "
            "AND lanes.dataset = jobs.dataset AND lanes.recipe_id = jobs.recipe_id "
            "AND coalesce(lanes.only_device_id, '') = coalesce(jobs.only_device_id, '')) WHERE state = 'ready'"
        )
    )


def downgrade() -> None:
    op.drop_index("ix_jobs_lane", table_name="jobs")
    op.drop_column("jobs", "lane_number")
    op.drop_column("jobs", "turn")
    op.drop_table("turns")
    op.drop_index("ix_lanes_dataset", table_name="lanes")
    op.drop_table("lanes")
    op.drop_index(
        "ix_leases_expiry",
        table_name="leases",
        sqlite_where=sa.text("ending IS NULL"),
        postgresql_where=sa.text("ending IS NULL"),
    )
    op.drop_index("ix_leases_job", table_name="leases")
    op.drop_column("leases", "seconds")
    for name in ("rests_until", "failures", "told", "labels"):
        op.drop_column("devices", name)
