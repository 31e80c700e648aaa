"""What the daemon tells systemd: that it is up, what it does, and, only when work has advanced, that it lives.

Lines to the datagram socket that systemd names in $NOTIFY_SOCKET; without one, nothing is said. Knows no job.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping

from shared.job import Progress

MARGIN = 10  # times the longest silence seen so far
SLOWEST_FLOPS = 5e8  # a second: slower than any device that finishes a job within its life
REPEATED = ("waiting", "downloading")  # phases without a count of steps
FEED_SECONDS = 5.0  # at most so often; far below any patience worth having


class Watchdog:
    """Feeds systemd's watchdog by progress alone, and has it wait longer where one step takes longer."""

    def __init__(
        self, environment: Mapping[str, str] = os.environ, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """environment: names the socket, and the watchdog's patience in microseconds. clock: seconds."""
        self._address = environment.get("NOTIFY_SOCKET", "")
        microseconds = environment.get("WATCHDOG_USEC", "")
        self._patience = int(microseconds) / 1e6 if microseconds.isdigit() else None
        self._clock = clock
        self._advanced = clock()
        self._fed = self._advanced - FEED_SECONDS
        self._last: Progress | None = None

    @property
    def patience(self) -> float | None:
        """Seconds of silence after which systemd ends the daemon; None: it never does."""
        return self._patience

    def ready(self) -> None:
        """The daemon is up."""
        self._send("READY=1")

    def stopping(self) -> None:
        """The daemon ends because it was asked to."""
        self._send("STOPPING=1")

    def expect(self, flops: float) -> None:
        """Before work whose longest silent part is `flops` operations: systemd is to wait for it on a slow device."""
        self._allow(flops / SLOWEST_FLOPS)

    def turn(self) -> None:
        """The daemon's loop came round: a wait ended, or the server answered or failed to."""
        self._feed()

    def show(self, progress: Progress) -> None:
        """Tells what the daemon does; progress that is not the last one over again feeds the watchdog.

        A wait for the rules is shown again after each look at the sensors, a download as bytes come; each time counts.
        """
        if progress != self._last or progress.phase in REPEATED:
            self._feed(progress.line())
        self._last = progress

    def _feed(self, status: str = "idle") -> None:
        now = self._clock()
        silence, self._advanced = now - self._advanced, now
        self._allow(silence * MARGIN)
        if now - self._fed >= FEED_SECONDS:
            self._fed = now
            self._send(f"WATCHDOG=1\nSTATUS={status}")

    def _allow(self, seconds: float) -> None:
        if self._patience is not None and seconds > self._patience:
            self._patience = seconds
            self._send(f"WATCHDOG_USEC={int(seconds * 1e6)}\nWATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as messenger:
            try:
                messenger.sendto(text.encode(), address)
            except OSError:
                # systemd is gone or busy: nothing that a training device should stop for.
                return
