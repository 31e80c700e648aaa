"""Runs revisions on the connection that `server.schema.upgrade` provides."""

from __future__ import annotations

from alembic import context

from server.database.columns import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
context.run_migrations()
