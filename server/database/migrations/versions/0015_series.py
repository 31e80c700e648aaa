"""Jobs that repeat: the series of a job, when its next job is due, and why it has ended.

Revision ID: 0015
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0013"
branch_labels = None
depends_on = None

DUE = sa.text("repeat_at IS NOT NULL")


def upgrade() -> None:
    """Adds the columns, which are null for jobs that do not repeat."""
    op.add_column("jobs", sa.Column("series", sa.String(64), nullable=True))
    op.add_column("jobs", sa.Column("repeat_at", sa.DateTime(), nullable=True))
    op.add_column("jobs", sa.Column("series_end", sa.Text(), nullable=True))
    op.create_index("ix_jobs_repeat", "jobs", ["repeat_at"], sqlite_where=DUE, postgresql_where=DUE)


def downgrade() -> None:
    """Removes the columns: jobs end without a next one."""
    op.drop_index("ix_jobs_repeat", "jobs")
    for name in ("series_end", "repeat_at", "series"):
        op.drop_column("jobs", name)
