"""Replays in turn: each takes a core for seconds. Knows no database and no file."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Unavailable

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)  # in one process
WAITING = 8  # threads at most that wait for a turn: the others are for those who wait for no replay
WAIT_SECONDS = 30.0

_turns = threading.BoundedSemaphore(AT_ONCE)
_room = threading.BoundedSemaphore(AT_ONCE + WAITING)


@contextmanager
def turn() -> Iterator[None]:
    """Holds a turn; call it in a thread. Raises Unavailable if too many wait, or this one has waited too long."""
    busy = Unavailable("the server is replaying other trajectories; try again in a moment")
    if not _room.acquire(blocking=False):
        raise busy
    try:
        if not _turns.acquire(timeout=WAIT_SECONDS):
            raise busy
        try:
            yield
        finally:
            _turns.release()
    finally:
        _room.release()
