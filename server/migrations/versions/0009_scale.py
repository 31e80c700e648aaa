"""Indexes that answer lists and leases alone, and which jobs have had their progress forgotten.

Revision ID: 0009
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_LIVE = sa.text("ending IS NULL")
_QUEUED = sa.text("state = 'queued'")
_ENDED_WHOLE = sa.text("NOT thinned AND state IN ('succeeded', 'failed', 'cancelled')")

# name, table, columns, condition
BEFORE = [
    ("ix_adapters_tenant", "adapters", [], None),
    ("ix_devices_tenant", "devices", ["tenant"], None),
    ("ix_jobs_ended", "jobs", [], None),
    ("ix_jobs_adapter", "jobs", [], None),
    ("ix_jobs_queued", "jobs", ["tenant", "priority", "number"], _QUEUED),
    ("ix_jobs_recipe", "jobs", [], None),
    ("ix_jobs_recipe_id", "jobs", ["recipe_id"], None),
    ("ix_jobs_state", "jobs", [], None),
    ("ix_jobs_tenant", "jobs", [], None),
    ("ix_jobs_user", "jobs", [], None),
    ("ix_jobs_waiting", "jobs", ["tenant", "state", "dataset"], None),
    ("ix_leases_device", "leases", ["device_id", "ending"], None),
    ("ix_leases_expiry", "leases", ["expires_at"], _LIVE),
    ("ix_tokens_tenant", "tokens", ["tenant"], None),
]
AFTER = [
    ("ix_adapters_tenant", "adapters", ["tenant", "number"], None),
    ("ix_devices_tenant", "devices", ["tenant", "number"], None),
    ("ix_jobs_ended", "jobs", ["updated_at", "number"], _ENDED_WHOLE),
    ("ix_jobs_adapter", "jobs", ["tenant", "adapter", "number", "state", "user"], None),
    ("ix_jobs_queued", "jobs", ["tenant", sa.text("priority DESC"), "number", "recipe_id"], _QUEUED),
    ("ix_jobs_recipe", "jobs", ["recipe_id", "state", "tenant", "number"], None),
    ("ix_jobs_recipe_id", "jobs", [], None),
    ("ix_jobs_state", "jobs", ["tenant", "state", "number", "user", "adapter", "recipe_id"], None),
    ("ix_jobs_tenant", "jobs", ["tenant", "number"], None),
    ("ix_jobs_user", "jobs", ["tenant", "user", "number", "state", "adapter"], None),
    ("ix_jobs_waiting", "jobs", [], None),
    ("ix_leases_device", "leases", ["device_id", "ending", "number", "job_number"], None),
    ("ix_leases_expiry", "leases", ["expires_at", "number", "job_number", "ending"], _LIVE),
    ("ix_tokens_tenant", "tokens", ["tenant", "number", "role"], None),
]


def upgrade() -> None:
    op.add_column("jobs", sa.Column("thinned", sa.Boolean(), server_default=sa.false(), nullable=False))
    _replace(BEFORE, AFTER)


def downgrade() -> None:
    _replace(AFTER, BEFORE)
    op.drop_column("jobs", "thinned")


def _replace(old: list[Any], new: list[Any]) -> None:
    """Replaces indexes by those of the same name; one without columns is none."""
    for name, table, columns, _ in old:
        if columns:
            op.drop_index(name, table_name=table)
    for name, table, columns, condition in new:
        if columns:
            op.create_index(name, table, columns, sqlite_where=condition, postgresql_where=condition)
