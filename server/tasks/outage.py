"""Temporary outages of the database: their exceptions, and repeating a transaction until it succeeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog

from server.database.database import Collision, DatabaseUnavailable
from shared.stop_signal import StopSignal

OUTAGES = (DatabaseUnavailable, Collision)
WAIT_SECONDS = 1.0
Value = TypeVar("Value")
_log = structlog.get_logger()


def insist(do: Callable[[], Value], giving_up: StopSignal) -> Value:
    """Runs `do`, one transaction, until the database is available; raises its error once `giving_up` is set."""
    while True:
        try:
            return do()
        except OUTAGES as error:
            _log.warning("database-away", error=str(error))
            if giving_up.wait(WAIT_SECONDS):
                raise
