"""The engine and its kinds of access: reading transactions, writing transactions, and autocommit reads.

On SQLite a writing transaction takes the write lock when it begins (BEGIN IMMEDIATE): the data it has read cannot
change before it writes, and two writers wait for each other instead of failing midway.

On PostgreSQL a reading transaction is REPEATABLE READ and READ ONLY: one snapshot that needs no locks and no retries. A
writing transaction is READ COMMITTED and locks the rows that it changes (`server.database.locking`). It waits for an
earlier transaction and then continues with its results, whereas SERIALIZABLE would have to restart one of the two.
Conflicts that locks do not order are caught by unique constraints: the later transaction raises `Collision` and is
retried.

Beginning and ending a transaction and checking its connection each take a round trip to PostgreSQL, as long as a
statement. Autocommit reads therefore have none of them, and a connection is checked only if it was idle or has unread
input.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, InvalidatePoolError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from server.database.failures import translate_errors
from server.database.sqlite import tune_sqlite
from server.settings import Tuning
from shared.errors import BadRequest

CLOSE_SECONDS = 5.0
RESTED_SECONDS = 1.0  # a connection idle for longer is checked before use
_RESTS_SINCE = "mobizo-rests-since"
APPLICATION = "mobizo-server"
DRIVERS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


class Database:
    """A database and its sessions. Connections are opened on first use.

    All sessions raise DatabaseUnavailable, Collision or Unstorable; see `server.database.failures`.
    """

    def __init__(self, url: str, tuning: Tuning | None = None) -> None:
        """Raises BadRequest for a URL of another kind of database."""
        self.engine = _engine(_parsed(url), tuning or Tuning())
        self._reading = sessionmaker(self._reader("REPEATABLE READ"), autoflush=False)
        self._autocommit = sessionmaker(self._reader("AUTOCOMMIT"), autoflush=False)
        self._listeners: list[Callable[[Session], None]] = []
        self._writing = sessionmaker(self.engine.execution_options(writes=True), expire_on_commit=False)

    def _reader(self, isolation: str) -> Engine:
        if self.engine.dialect.name == "sqlite":
            return self.engine
        return self.engine.execution_options(isolation_level=isolation, postgresql_readonly=True)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session on one snapshot. Its writes are rolled back or rejected."""
        with translate_errors(), self._reading() as session:
            yield session

    @contextmanager
    def autocommit(self) -> Iterator[Session]:
        """A session in which every statement reads its own snapshot, for a single statement or for polling."""
        with translate_errors(), self._autocommit() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session that is committed at the end, or rolled back if an exception is raised."""
        with translate_errors(), self._writing.begin() as session:
            yield session
        for listener in self._listeners:
            listener(session)

    def after_commit(self, listener: Callable[[Session], None]) -> None:
        """Registers a listener, called after each writing transaction in its thread with the ended session."""
        self._listeners.append(listener)

    def before_commit(self, do: Callable[[Session], None]) -> None:
        """Registers a function, called with every writing session before its commit, within its transaction."""
        event.listen(self._writing, "before_commit", do)

    def close(self) -> None:
        """Closes all connections, after waiting up to CLOSE_SECONDS for those in use."""
        pool = self.engine.pool
        deadline = time.monotonic() + CLOSE_SECONDS
        while isinstance(pool, QueuePool) and pool.checkedout() > 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        self.engine.dispose()


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise BadRequest(
            "MOBIZO_DATABASE_URL is not a valid URL; the form is postgresql://user@host/database"
        ) from error
    if url.drivername not in DRIVERS:
        raise BadRequest(
            f"MOBIZO_DATABASE_URL starts with {url.drivername}:, but only postgresql: and sqlite: are supported"
        )
    return url.set(drivername=DRIVERS[url.drivername])


def _engine(url: URL, tuning: Tuning) -> Engine:
    pool = {
        "pool_size": tuning.connections,
        "max_overflow": tuning.overflow,
        "pool_timeout": tuning.connect_seconds,
    }
    if url.get_backend_name() == "sqlite":
        engine = create_engine(url, **pool)
        tune_sqlite(engine, tuning.lock_seconds)
        return engine
    limits = {
        "statement_timeout": tuning.statement_seconds,
        "lock_timeout": tuning.lock_seconds,
        # Ends abandoned transactions of a stuck process, whose locks block others.
        "idle_in_transaction_session_timeout": 2 * tuning.statement_seconds,
    }
    given = {
        "application_name": APPLICATION,
        # The driver accepts whole seconds, at least two.
        "connect_timeout": max(2, round(tuning.connect_seconds)),
        "options": " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in limits.items()),
        # Detects a host that has disappeared without closing its connections.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": round(tuning.statement_seconds * 1000),
    }
    engine = create_engine(
        url,
        **pool,
        pool_recycle=round(tuning.recycle_seconds),
        connect_args={name: value for name, value in given.items() if name not in url.query},
    )
    _ask_rested(engine)
    return engine


def _ask_rested(engine: Engine) -> None:
    """Replaces connections that broke while idle, for example because the database was restarted."""

    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info[_RESTS_SINCE] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def checkout(connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        since = record.info.get(_RESTS_SINCE)
        # A closed connection has unread input; a host that has disappeared leaves none.
        if since is None or (time.monotonic() - since < RESTED_SECONDS and not _has_news(connection)):
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            # The other connections of the pool are broken too.
            raise InvalidatePoolError from error


def _has_news(connection: Any) -> bool:
    """Returns whether a connection has unread input, including its end. Does not wait."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
