"""Last-seen times and reports of devices, written about once a minute for each device.

A crash loses at most the last minute, which devices report again with their next request for a job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.clock import utc_now
from server.identity.devices.models import DeviceReport
from server.identity.devices.repository import DeviceRepository

NOTE_SECONDS = 60.0


@dataclass(frozen=True)
class Presence:
    """A sign of life from a device. report: what it reported about itself, if anything."""

    device_id: str
    report: DeviceReport | None = None


class PresenceLog:
    """When this process last wrote each device. Use it only in the thread of the event loop."""

    def __init__(self) -> None:
        self._noted: dict[str, tuple[float, DeviceReport | None]] = {}

    def due(self, presence: Presence) -> bool:
        """Whether this presence is due to be written; if so, it counts as written."""
        now = time.monotonic()
        at, report = self._noted.get(presence.device_id, (-NOTE_SECONDS, None))
        lasting = None if presence.report is None else presence.report.lasting()
        if now - at < NOTE_SECONDS and lasting in (None, report):
            return False
        self._noted[presence.device_id] = now, lasting or report
        return True


def write_presences(session: Session, presences: Sequence[Presence]) -> list[None]:
    """Writes several presences in one transaction."""
    devices = DeviceRepository(session)
    now = utc_now()
    for presence in sorted(presences, key=lambda presence: presence.device_id):
        devices.seen(presence.device_id, now, presence.report)
    return [None] * len(presences)
