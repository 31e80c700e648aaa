"""SQLite as a server's database: durable, strict, and one writer after another. Knows no tables."""

from __future__ import annotations

import threading
from typing import Any

from sqlalchemy import Connection, Engine, event

from server.db.failures import DatabaseUnavailable

_AT_THE_GATE = "mobizo-writes"


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
        for pragma in (
            f"busy_timeout = {round(lock_seconds * 1000)}",
            "journal_mode = WAL",
            "synchronous = FULL",
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}")

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
