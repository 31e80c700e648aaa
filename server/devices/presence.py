"""That devices were heard from, and what they said of themselves: written about once a minute. Knows no HTTP.

A crash loses at most the last minute of it, which devices tell again when they ask for a job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.devices.models import Told
from server.devices.repository import DeviceRepository

NOTE_SECONDS = 60.0


@dataclass(frozen=True)
class Presence:
    """That a device is there. told: what it said of itself, if it did."""

    device_id: str
    told: Told | None = None


class Attendance:
    """When this process last noted each device; belongs to the thread that runs the event loop."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, Told | None]] = {}

    def due(self, presence: Presence) -> bool:
        """Whether it is to be written now; it counts as written from then on."""
        now = time.monotonic()
        at, told = self._noted.get(presence.device_id, (-NOTE_SECONDS, None))
        lasting = None if presence.told is None else presence.told.lasting()
        if now - at < NOTE_SECONDS and lasting in (None, told):
            return False
        self._noted[presence.device_id] = now, lasting or told
        return True


def write_presences(session: Session, presences: Sequence[Presence]) -> list[None]:
    """Notes several devices in one transaction."""
    devices = DeviceRepository(session)
    now = utc_now()
    for presence in sorted(presences, key=lambda presence: presence.device_id):
        devices.seen(presence.device_id, now, presence.told)
    return [None] * len(presences)
