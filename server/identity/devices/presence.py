"""When devices were last seen and what they reported: written about once a minute for each, many in one transaction.

A crash loses at most the last minute, which devices report again with their next request for a job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import DeviceReport, DeviceRepository
from server.web.state import AppState, GroupCommit

NOTE_SECONDS = 60.0  # between two writes of one device


@dataclass(frozen=True)
class Presence:
    """A sign of life from a device. report: what it reported about itself, if anything."""

    device_id: str
    report: DeviceReport | None = None


class PresenceLog:
    """When this process last wrote each device. Use it only in the thread of the event loop."""

    def __init__(self) -> None:
        # By device: when, what lasts of its report, and that report.
        self._noted: dict[str, tuple[float, DeviceReport | None, DeviceReport | None]] = {}

    def due(self, presence: Presence) -> bool:
        """Whether this presence is due to be written; if so, it counts as written."""
        now = time.monotonic()
        at, noted, report = self._noted.get(presence.device_id, (-NOTE_SECONDS, None, None))
        lasting = noted
        if presence.report not in (None, report):
            report, lasting = presence.report, presence.report.lasting()
        if now - at < NOTE_SECONDS and lasting == noted:
            return False
        self._noted[presence.device_id] = now, lasting, report
        return True


def write_presences(session: Session, presences: Sequence[Presence]) -> list[None]:
    """Writes several presences in one transaction."""
    reports: dict[str, DeviceReport | None] = {}
    for presence in presences:
        reports[presence.device_id] = presence.report or reports.get(presence.device_id)
    DeviceRepository(session).record_presences(reports, utc_now())
    return [None] * len(presences)


class Presences:
    """Records that devices are online: many in one transaction, and each device about once a minute."""

    def __init__(self, writes: GroupCommit[Presence, None]) -> None:
        self._log, self._writes = PresenceLog(), writes

    async def record(self, presence: Presence) -> None:
        """Records that a device is online, unless that was recorded a moment ago."""
        if self._log.due(presence):
            await self._writes.add(presence)


def make_presences(state: AppState) -> Presences:
    """Makes the record of devices that are online, for `AppState.get`."""
    return Presences(GroupCommit(state.database, state.write_queue, write_presences))
