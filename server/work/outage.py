"""A database that goes away for a while: what that looks like, and how a worker sits it out. Knows no tables."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import structlog

from server.db.failures import Collision, DatabaseUnavailable

OUTAGES = (DatabaseUnavailable, Collision)
WAIT_SECONDS = 1.0
Value = TypeVar("Value")
_log = structlog.get_logger()


def insist(do: Callable[[], Value], giving_up: threading.Event) -> Value:
    """What `do`, one transaction, returns; tried again while the database is away. Raises its error when giving up."""
    while True:
        try:
            return do()
        except OUTAGES as error:
            _log.warning("database-away", error=str(error))
            if giving_up.wait(WAIT_SECONDS):
                raise
