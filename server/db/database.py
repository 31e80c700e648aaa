"""Engine and transactions: one that reads, one that writes, and a glance, which is none. Knows no tables.

On SQLite a writing transaction takes the write lock when it begins (BEGIN IMMEDIATE): what it read cannot change
before it writes, and two writers wait for each other instead of failing half-way.

On PostgreSQL a reading transaction is REPEATABLE READ and READ ONLY: one snapshot, which needs no lock and never has to
be tried again. A writing one is READ COMMITTED with locks on the rows that it is about (`server.db.locking`): it waits
for who is there first and then goes on from what that one left, where SERIALIZABLE would make one of the two start
over. What locks do not order, unique constraints do: the later one meets a `Collision` and starts over.

What a transaction costs beside its statements, beginning, end and the question whether its connection still stands, are
trips to PostgreSQL as long as a statement's. So a glance has none of them, and only a connection that rested, or that
something has come in on, is asked.
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

from server.db.failures import told
from server.db.sqlite import tune_sqlite
from server.db.tuning import Tuning
from shared.errors import BadRequest

CLOSE_SECONDS = 5.0
RESTED_SECONDS = 1.0  # a connection not used for as long is asked whether it still stands, though nothing was heard
_RESTS_SINCE = "mobizo-rests-since"
APPLICATION = "mobizo-server"
DRIVERS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


class Database:
    """A database and its two kinds of transaction. Opens no connection by itself.

    Both kinds raise DatabaseUnavailable, Collision or Unstorable, see `server.db.failures`.
    """

    def __init__(self, url: str, tuning: Tuning | None = None) -> None:
        """Raises BadRequest for a URL of another kind of database."""
        self.engine = _engine(_parsed(url), tuning or Tuning())
        self._reading = sessionmaker(self._reader("REPEATABLE READ"), autoflush=False)
        self._glancing = sessionmaker(self._reader("AUTOCOMMIT"), autoflush=False)
        self._listeners: list[Callable[[Session], None]] = []
        self._writing = sessionmaker(self.engine.execution_options(writes=True), expire_on_commit=False)

    def _reader(self, isolation: str) -> Engine:
        if self.engine.dialect.name == "sqlite":
            return self.engine
        return self.engine.execution_options(isolation_level=isolation, postgresql_readonly=True)

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """A session on one snapshot; what it is told to write is dropped, or refused."""
        with told(), self._reading() as session:
            yield session

    @contextmanager
    def glancing(self) -> Iterator[Session]:
        """A session whose every statement reads for itself: for a single one, or where a transaction looks again."""
        with told(), self._glancing() as session:
            yield session

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A session whose work is committed at the end, or dropped whole if anything is raised."""
        with told(), self._writing.begin() as session:
            yield session
        for listener in self._listeners:
            listener(session)

    def after_commit(self, listener: Callable[[Session], None]) -> None:
        """Has `listener` called after each writing transaction, in its thread, with its ended session."""
        self._listeners.append(listener)

    def before_commit(self, do: Callable[[Session], None]) -> None:
        """From now on `do` gets every writing session before it is committed, in its transaction."""
        event.listen(self._writing, "before_commit", do)

    def close(self) -> None:
        """Closes all connections, once those who use them are done."""
        pool = self.engine.pool
        deadline = time.monotonic() + CLOSE_SECONDS
        while isinstance(pool, QueuePool) and pool.checkedout() > 0 and time.monotonic() < deadline:
            time.sleep(0.005)
        self.engine.dispose()


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise BadRequest("MOBIZO_DATABASE_URL is no URL; it looks like postgresql://user@host/database") from error
    if url.drivername not in DRIVERS:
        raise BadRequest(
            f"MOBIZO_DATABASE_URL begins with {url.drivername}:, and only postgresql: and sqlite: are known here"
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
        # Of a transaction that was begun and left: its process is stuck, and others wait for its locks.
        "idle_in_transaction_session_timeout": 2 * tuning.statement_seconds,
    }
    given = {
        "application_name": APPLICATION,
        # The driver knows whole seconds, at least two.
        "connect_timeout": max(2, round(tuning.connect_seconds)),
        "options": " ".join(f"-c {name}={round(seconds * 1000)}" for name, seconds in limits.items()),
        # A host that is gone without a word is noticed.
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
    """A connection that broke while nobody used it, as when the database is started again, is replaced unseen."""

    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: ConnectionPoolEntry) -> None:
        record.info[_RESTS_SINCE] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def checkout(connection: Any, record: ConnectionPoolEntry, proxy: Any) -> None:
        since = record.info.get(_RESTS_SINCE)
        # Who hangs up can be heard to; a host that is gone cannot.
        if since is None or (time.monotonic() - since < RESTED_SECONDS and not _has_news(connection)):
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as error:
            # The others of the pool broke with it.
            raise InvalidatePoolError from error


def _has_news(connection: Any) -> bool:
    """Whether PostgreSQL has said something unasked on a connection, its end included. Waits for nothing."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))
