"""The engine, its transactions (reading, writing, autocommit reads), row locks, and the errors they raise.

On SQLite a writing transaction takes the write lock when it begins (BEGIN IMMEDIATE): the data it has read cannot
change before it writes, and two writers wait for each other instead of failing midway.

On PostgreSQL a reading transaction is REPEATABLE READ and READ ONLY: one snapshot that needs no locks and no retries. A
writing transaction is READ COMMITTED and locks the rows that it changes. It waits for an
earlier transaction and then continues with its results, whereas SERIALIZABLE would have to restart one of the two.
Conflicts that locks do not order are caught by unique constraints: the later transaction raises `Collision` and is
retried.

Beginning and ending a transaction each take a round trip to PostgreSQL, as long as a statement. Autocommit reads
therefore have none of them. A connection is checked before each use, which replaces those that broke while idle.

Outages become `DatabaseUnavailable`, conflicts between concurrent transactions become `Collision` (retryable), and
values that no column can hold become `Unstorable`. Any other database error is a bug and is raised unchanged.

The following rows guard data. Locks are taken in this order, to avoid deadlocks. A transaction in a deadlock is retried
(`server.web.routes`).

0. the row of the current signing key (`server.identity.signing_keys`): shared for signing, exclusive for key rotation
1. a cohort's row guards its members, its rounds and their updates
2. a device's row guards its users and its leases; a transaction that grants or updates a lease writes this row first
3. a program's row guards its state and the jobs that wait for it
4. a job's row guards the job, the numbers of its events, and its leases: a lease changes only with its job locked
5. an adapter's row guards its versions and `main`
6. a masked round's row guards its phase and the messages of its devices
7. a tenant's row guards its stored bytes

A worker's transaction first locks the row of its task, which guards who runs the task, and then, for a claim, the name
of its machine.

Names are locked (`lock_name`) where no row stands for what is checked: an adapter's name before a job or a cohort takes
it, and a tenant's quota after something was added to it.

A statement that waits for a lock sees the locked row as the previous transaction left it, but all other data, such as
the result of an EXISTS, as of the start of the statement. Read data that depends on a lock in a later statement.
"""

from __future__ import annotations

import hashlib
import random
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from sqlalchemy import URL, Connection, CursorResult, Engine, Executable, Select, create_engine, event, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import QueuePool

from server.database.columns import Table
from server.database.paging import Condition, Row
from server.settings import Tuning
from shared.errors import BadRequest, Conflict, Unavailable

SelectStatement = TypeVar("SelectStatement", bound=Select[*tuple[Any, ...]])
AnyRow = TypeVar("AnyRow", bound=Table)
CLOSE_SECONDS = 5.0
APPLICATION = "mobizo-server"
DRIVERS = {
    "sqlite": "sqlite",
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
TRIES = 6
_PAUSE_SECONDS = 0.02
# SQLSTATEs: serialization failure, deadlock, unique violation. SQLite has one writer at a time, so it has none.
_COLLISIONS = {"40001", "40P01", "23505"}
# A write to a standby, as during a failover.
_READ_ONLY = "25006"
_HOLDS_GATE = "mobizo-writes"


class Database:
    """A database and its sessions. Connections are opened on first use.

    All sessions raise DatabaseUnavailable, Collision or Unstorable.
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
    connect_options = {
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
    return create_engine(
        url,
        **pool,
        pool_pre_ping=True,
        pool_recycle=round(tuning.recycle_seconds),
        connect_args={name: value for name, value in connect_options.items() if name not in url.query},
    )


class DatabaseUnavailable(Unavailable, code=Unavailable.code):
    """The database is temporarily unavailable. Nothing was changed; try again later."""


class Collision(Unavailable, code=Unavailable.code):
    """Concurrent requests kept changing the same data. Nothing was changed; try again later."""


class Unstorable(BadRequest, code=BadRequest.code):
    """The request contains a character or a number that cannot be stored; remove it."""


@contextmanager
def translate_errors() -> Iterator[None]:
    """Context manager that replaces database errors with the application's own."""
    try:
        yield
    except PoolTimeout as error:
        raise DatabaseUnavailable from error
    except DBAPIError as error:
        translated = _translated(error)
        if translated is None:
            raise
        raise translated from error


def pause_seconds(tries: int) -> float:
    """Returns a random delay before the next attempt, so that the same two transactions do not collide again."""
    return random.uniform(0, _PAUSE_SECONDS * 2**tries)


def _translated(error: DBAPIError) -> DatabaseUnavailable | Collision | Unstorable | None:
    state = getattr(error.orig, "sqlstate", None)
    if state in _COLLISIONS:
        return Collision()
    if isinstance(error, OperationalError | InterfaceError) or error.connection_invalidated or state == _READ_ONLY:
        return DatabaseUnavailable()
    return Unstorable() if isinstance(error, DataError) else None


def tune_sqlite(engine: Engine, lock_seconds: float) -> None:
    """Configures each connection, and begins transactions as described in this module's docstring.

    Writers of this process wait for a lock in memory (the gate) instead of the file lock, which SQLite polls every
    100 ms or less and grants in no fair order. lock_seconds: timeout for the gate and for other processes.
    """
    gate = threading.Lock()

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        # The driver must not begin transactions itself; `begin` below does.
        connection.isolation_level = None
        connection.execute(f"PRAGMA busy_timeout = {round(lock_seconds * 1000)}")
        _write_ahead(connection, lock_seconds)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        if not connection.get_execution_options().get("writes", False):
            connection.exec_driver_sql("BEGIN")
            return
        if not gate.acquire(timeout=lock_seconds):
            raise DatabaseUnavailable
        connection.info[_HOLDS_GATE] = True
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Released after the commit, which takes longest: before it, the next writer would only wait for the file lock.
    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: Any) -> None:
        if record.info.pop(_HOLDS_GATE, False):
            gate.release()


def _write_ahead(connection: Any, lock_seconds: float) -> None:
    """Enables the write-ahead log. SQLite changes the mode of a new file under a lock for which it does not wait."""
    deadline = time.monotonic() + lock_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # primary result code of an extended code
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def locked(statement: SelectStatement, *, of: Any = None, skip: bool = False, lock: bool = True) -> SelectStatement:
    """Returns `statement` with row locks until the end of the transaction. Rows are read after they are locked.

    of: tables whose rows are locked; None: all. skip: skips rows that are locked by others instead of waiting.
    lock: False returns the statement as it is.
    Other transactions can still insert foreign keys to a locked row.
    """
    if not lock:
        return statement
    locking: SelectStatement = statement.with_for_update(of=of, skip_locked=skip, key_share=True)
    return locking.execution_options(populate_existing=True)


def lock_name(session: Session, *parts: str) -> None:
    """Waits until no other transaction has locked this name, and locks it until the transaction ends.

    For checks of what no row stands for, such as the number of rows or a name that must be free. Read in a later
    statement. SQLite has one writing transaction at a time, so that nothing is to be locked.
    """
    if session.get_bind().dialect.name == "postgresql":
        key = int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big", signed=True)
        session.flush()
        session.execute(select(func.pg_advisory_xact_lock(key)))


def read_columns(session: Session, statement: Executable, parameters: Mapping[str, Any]) -> CursorResult[Any]:
    """Executes a statement that returns columns and no objects, after pending changes.

    For statements of every request: what a session adds to a statement costs about as much as the statement.
    """
    session.flush()
    return session.connection().execute(statement, parameters)


def insert_or(session: Session, table: Any) -> Any:
    """Returns an INSERT into `table`, a class or a table, that can have an ON CONFLICT clause."""
    insert: Any = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    return insert(table)


class Repository:
    """All SQL of some tables, in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, *rows: Table) -> None:
        """Stores new rows, and gives them their numbers."""
        self._session.add_all(rows)
        self._session.flush()

    def _one(self, table: type[AnyRow], *conditions: Condition, lock: bool = False) -> AnyRow | None:
        """Returns the row that meets all conditions, or None. lock: until the transaction ends."""
        return self._session.scalar(locked(select(table).where(*conditions), lock=lock))

    def _all(
        self, table: type[Row], *conditions: Condition, lock: bool = False, limit: int | None = None
    ) -> Sequence[Row]:
        """Returns the rows that meet all conditions, oldest first, at most `limit` of them."""
        statement = select(table).where(*conditions).order_by(table.number).limit(limit)
        return self._session.scalars(locked(statement, lock=lock)).all()

    def _count(self, *conditions: Condition) -> int:
        """Returns how many rows meet all conditions."""
        return self._session.scalars(select(func.count()).where(*conditions)).one()


def change_state(
    row: Any, state: StrEnum, transitions: Mapping[Any, Collection[Any]], name: str, changes: Mapping[str, Any]
) -> None:
    """Moves a row to `state` and sets other columns with it. name: of the row, in the error.

    transitions: the states that may follow each state. Raises Conflict if the move is not allowed.
    """
    if state not in transitions[row.state]:
        raise Conflict(f"{name} is {row.state}; it cannot become {state}")
    row.state = state
    for column, value in changes.items():
        setattr(row, column, value)


def add_if_absent(session: Session, table: type[Table], **values: Any) -> None:
    """Adds a row to `table` unless one of its keys is taken. Waits for a concurrent transaction with the same key."""
    session.execute(insert_or(session, table).values(**values).on_conflict_do_nothing())
