"""The server's clock, as its answers tell it, for a device whose own may be hours off. Knows no HTTP library."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime


class ServerClock:
    """What time it is at the server: its last answer's Date and the seconds since, whatever this device's clock does.

    Safe to use from several threads.
    """

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, local: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        """monotonic: seconds that only grow. local: this device's own clock."""
        self._monotonic, self._local = monotonic, local
        self._heard: tuple[datetime, float] | None = None

    def hear(self, date: str | None) -> None:
        """Takes the Date header of an answer that came just now; one that cannot be read tells nothing."""
        try:
            heard = parsedate_to_datetime(date or "")
        except ValueError:
            return
        # A Date without a zone means UTC as well (RFC 9110 wants "GMT" there).
        self._heard = (heard if heard.tzinfo else heard.replace(tzinfo=UTC), self._monotonic())

    def set(self, moment: datetime) -> None:
        """Takes the time that the server named just now."""
        self._heard = (moment, self._monotonic())

    def now(self) -> datetime:
        """The time at the server, to the second; this device's own before any answer."""
        if self._heard is None:
            return self._local()
        date, at = self._heard
        return date + timedelta(seconds=self._monotonic() - at)

    def left(self, moment: datetime) -> float:
        """Seconds from now to a moment of the server's clock."""
        return (moment - self.now()).total_seconds()

    @property
    def skew(self) -> float | None:
        """Seconds that this device's clock is ahead of the server's; None before any answer."""
        return None if self._heard is None else (self._local() - self.now()).total_seconds()
