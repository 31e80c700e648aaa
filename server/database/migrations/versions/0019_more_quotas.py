"""Quotas of series, jobs per day and events: indexes of the first two, and the most events of each job.

Revision ID: 0019
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

COLUMNS = ["tenant", "series", "repeat_at", "state"]  # those of the condition, so that counting reads no row
SUBMITTED = sa.text("round IS NULL")
LATEST = sa.text("series IS NOT NULL AND (repeat_at IS NOT NULL OR state NOT IN ('succeeded', 'failed', 'cancelled'))")


def upgrade() -> None:
    """Creates the indexes; jobs may have as many events as before."""
    op.add_column("jobs", sa.Column("max_events", sa.Integer(), nullable=False, server_default="10000"))
    of_day = ["tenant", "created_at", "round"]
    op.create_index("ix_jobs_submitted", "jobs", of_day, sqlite_where=SUBMITTED, postgresql_where=SUBMITTED)
    op.create_index("ix_jobs_series", "jobs", COLUMNS, sqlite_where=LATEST, postgresql_where=LATEST)


def downgrade() -> None:
    """Removes them."""
    op.drop_index("ix_jobs_series", "jobs")
    op.drop_index("ix_jobs_submitted", "jobs")
    op.drop_column("jobs", "max_events")
