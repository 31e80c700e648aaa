"""Whole-model conversions and B after single steps are no longer made by the server: their tables and tasks go.

Revision ID: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"

CONVERSION_TASKS = "SELECT number FROM tasks WHERE kind = 'conversion'"


def upgrade() -> None:
    """Removes tables and tasks. Garbage collection removes the files, which nothing references any more."""
    op.drop_table("trajectory_steps")
    op.drop_table("conversion_files")
    op.drop_table("conversions")
    op.execute(f"DELETE FROM task_requests WHERE task_number IN ({CONVERSION_TASKS})")  # noqa: S608 - a constant
    op.execute("DELETE FROM tasks WHERE kind = 'conversion'")
    op.execute("DELETE FROM task_turns WHERE kind = 'conversion'")
