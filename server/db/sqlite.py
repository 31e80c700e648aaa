"""SQLite as a server's database: durable, strict, and one writer after another. Knows no tables."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import Any

from sqlalchemy import Connection, Engine, event

from server.db.failures import DatabaseUnavailable

_AT_THE_GATE = "mobizo-writes"
_PAUSE_SECONDS = 0.02


def tune_sqlite(engine: Engine, lock_seconds: float) -> None:
    """Sets up each connection, and lets transactions begin as `server.db.database` says.

    This process's writers wait for each other at a gate and not at the file's lock: whoever waits there sleeps, looks
    again after up to 100 ms, and may be overtaken each time. lock_seconds: for the gate, and for other processes.
    """
    gate = threading.Lock()

    @event.listens_for(engine, "connect")
    def connect(connection: Any, record: Any) -> None:
        # The driver must not begin transactions by itself: `begin` below does.
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

    # After the commit, which is what takes long: who is let through earlier would only wait at the file's lock.
    @event.listens_for(engine, "checkin")
    def checkin(connection: Any, record: Any) -> None:
        if record.info.pop(_AT_THE_GATE, False):
            gate.release()


def _write_ahead(connection: Any, lock_seconds: float) -> None:
    """Sets the journal's mode. A new file's is changed under a lock for which SQLite does not wait by itself."""
    deadline = time.monotonic() + lock_seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY  # of an extended code, its kind
            if not busy or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)
