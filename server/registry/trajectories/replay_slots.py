"""Limits concurrent replays, because each occupies a core for seconds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import Unavailable

AT_ONCE = max(1, (os.cpu_count() or 1) // 2)  # in one process
WAITING = 8  # threads that may wait for a slot; the other threads stay free for requests without a replay
WAIT_SECONDS = 30.0

_slots = threading.BoundedSemaphore(AT_ONCE)
_admitted = threading.BoundedSemaphore(AT_ONCE + WAITING)


@contextmanager
def replay_slot() -> Iterator[None]:
    """Occupies a slot; blocks its thread. Raises Unavailable if too many threads wait, or this one for too long."""
    busy = Unavailable("the server is replaying other trajectories; try again in a moment")
    if not _admitted.acquire(blocking=False):
        raise busy
    try:
        if not _slots.acquire(timeout=WAIT_SECONDS):
            raise busy
        try:
            yield
        finally:
            _slots.release()
    finally:
        _admitted.release()
