"""A stop request that a signal handler can set while any thread, the interrupted one included, waits for it.

`threading.Event` cannot do this: a handler that calls `Event.set` while the main thread holds the event's lock inside
`Event.wait` waits for that lock for ever.
"""

from __future__ import annotations

import os
import select
import weakref


class StopSignal:
    """Requested at most once, by `set`; a flag and a pipe, so that no lock is taken."""

    def __init__(self) -> None:
        self._requested = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        weakref.finalize(self, _close, self._reader, self._writer)

    def set(self) -> None:
        """Requests the stop and wakes every waiting thread. Safe in a signal handler."""
        if not self._requested:
            self._requested = True
            os.write(self._writer, b"\0")  # never read, so that the pipe stays readable

    def is_set(self) -> bool:
        """Whether the stop was requested."""
        return self._requested

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until the stop is requested, at most `seconds` (None: for ever). Returns whether it was requested."""
        if not self._requested:
            timeout = None if seconds is None else max(seconds, 0.0) * 1000  # milliseconds
            poll = select.poll()
            poll.register(self._reader, select.POLLIN)
            poll.poll(timeout)
        return self._requested


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def never() -> bool:
    """A stop function that never stops."""
    return False
