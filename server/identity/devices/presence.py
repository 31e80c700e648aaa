"""When devices were last seen and what they reported: written about once a minute for each, many in one transaction.

A crash loses at most the last minute, which devices report again with their next request for a job.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.identity.devices.repository import DeviceReport, DeviceRepository
from server.web.state import AppState, group_commit

NOTE_SECONDS = 60.0  # between two writes of one device


class Presences:
    """Records that devices are online. Use it only in the thread of the event loop."""

    def __init__(self, state: AppState) -> None:
        self._writes = group_commit(state.database, state.write_queue, _write)
        # When this process last wrote each device, what lasts of its report, and that report.
        self._noted: dict[str, tuple[float, DeviceReport | None, DeviceReport | None]] = {}

    async def record(self, device_id: str, report: DeviceReport | None = None) -> None:
        """Records that a device is online, unless that was recorded a moment ago. report: what it reported, if so."""
        now = time.monotonic()
        at, noted, latest = self._noted.get(device_id, (-NOTE_SECONDS, None, None))
        lasting = noted
        if report is not None and report != latest:
            latest, lasting = report, report.lasting()
        if now - at < NOTE_SECONDS and lasting == noted:
            return
        self._noted[device_id] = now, lasting, latest
        await self._writes.add((device_id, report))


def _write(session: Session, presences: Sequence[tuple[str, DeviceReport | None]]) -> list[None]:
    reports: dict[str, DeviceReport | None] = {}
    for device_id, report in presences:
        reports[device_id] = report or reports.get(device_id)
    DeviceRepository(session).record_presences(reports, utc_now())
    return [None] * len(presences)
