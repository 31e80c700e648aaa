"""Engine and transactions: one that reads, one that writes. Knows no tables.

On SQLite a writing transaction takes the write lock when it begins (BEGIN IMMEDIATE): what it read cannot change
before it writes, and two writers wait for each other instead of failing half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

BUSY_MILLISECONDS = 30_000


class Database:
    """A database and its two kinds of transaction."""

    def __init__(self, url: str) -> None:
        self.engine = create_engine(url, pool_size=20, max_overflow=40)
        if make_url(url).get_backend_name() == "sqlite":
            _tune_sqlite(self.engine)
        self._reading = sessionmaker(self.engine, autoflush=False)
        self._writing = sessionmaker(self.engine.execution_options(writes=True), expire_on_commit=False)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session on one snapshot; what it is told to write is dropped."""
        with self._reading() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose work is committed at the end, or dropped whole if anything is raised."""
        with self._writing.begin() as session:
            yield session

    def before_commit(self, do: Callable[[Session], None]) -> None:
        """From now on `do` gets every writing session before it is committed, in its transaction."""
        event.listen(self._writing, "before_commit", do)

    def close(self) -> None:
        """Closes idle connections."""
        self.engine.dispose()


def _tune_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        # The driver must not begin transactions by itself: `begin` below does.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {BUSY_MILLISECONDS}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
