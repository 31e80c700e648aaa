"""Adds a row if it is absent, in one statement, so that concurrent transactions do not fail."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from server.database.columns import Table


def add_if_absent(session: Session, table: type[Table], **values: Any) -> None:
    """Adds a row to `table` unless one of its keys is taken. Waits for a concurrent transaction with the same key."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    session.execute(insert(table).values(**values).on_conflict_do_nothing())
