"""Configures SQLite as a server's database: durable, with foreign keys, and with one writer at a time."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import Any

from sqlalchemy import Connection, Engine, event

from server.database.failures import DatabaseUnavailable

_AT_THE_GATE = "mobizo-writes"
_PAUSE_SECONDS = 0.02


def tune_sqlite(engine: Engine, lock_seconds: float) -> None:
    """Configures each connection, and begins transactions as described in `server.database.database`.

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
        connection.info[_AT_THE_GATE] = True
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    # Released after the commit, which takes longest: before it, the next writer would only wait for the file lock.
    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: Any) -> None:
        if record.info.pop(_AT_THE_GATE, False):
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
