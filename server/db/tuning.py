"""How a database is talked to: connections, their age, and how long anything may take. Knows no database."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Connections of one process; times in seconds.

    recycle_seconds: a connection older than this is replaced by a new one when it is next asked for. connect_seconds:
    for a connection, also if all are in use. statement_seconds: for one statement. lock_seconds: for somebody else's
    lock. On SQLite only lock_seconds counts.
    """

    connections: int = 20
    overflow: int = 40
    recycle_seconds: float = 1800
    connect_seconds: float = 5
    statement_seconds: float = 30
    lock_seconds: float = 10
