"""Runs revisions on the connection that `server.db.schema.upgrade` hands over."""

from __future__ import annotations

from alembic import context

from server.db.columns import Table

context.configure(
    connection=context.config.attributes["connection"], target_metadata=Table.metadata, render_as_batch=True
)
context.run_migrations()
