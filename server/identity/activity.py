"""When tokens were last used and devices last seen, collected in memory so that requests do not wait for the writes.

Times of tokens are written once a minute. Times and reports of devices are written about once a minute for each device,
many in one transaction. A crash loses at most the last minute, which devices report again with their next request for
a job. `AppState.get` makes each service once in a process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import structlog
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from server.clock import utc_now
from server.database.database import Database
from server.database.write_queue import GroupCommit
from server.identity.devices.repository import DeviceReport, DeviceRepository
from server.identity.tokens import TokenRepository
from server.web.state import AppState
from shared.errors import Unavailable

WRITE_SECONDS = 60.0  # between two writes of tokens' times
NOTE_SECONDS = 60.0  # between two writes of one device
_log = structlog.get_logger()


class LastUsed:
    """Last-used times that are not written yet, by token number."""

    def __init__(self) -> None:
        self._moments: dict[int, datetime] = {}

    def note(self, token: int, moment: datetime) -> None:
        """Records that a token was used."""
        self._moments[token] = moment

    def write(self, database: Database) -> None:
        """Writes the recorded times; keeps them for the next attempt if the database is unavailable."""
        moments, self._moments = self._moments, {}
        if not moments:
            return
        try:
            with database.writing() as session:
                TokenRepository(session).used(moments)
        except (SQLAlchemyError, Unavailable) as error:
            self._moments = moments | self._moments
            _log.warning("token-uses-not-written", error=str(error).split("\n")[0])

    async def keep_writing(self, database: Database) -> None:
        """Writes once a minute until it is cancelled."""
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await run_in_threadpool(self.write, database)


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


class Presences:
    """Records that devices are online: many in one transaction, and each device about once a minute."""

    def __init__(self, writes: GroupCommit[Presence, None]) -> None:
        self._log, self._writes = PresenceLog(), writes

    async def record(self, presence: Presence) -> None:
        """Records that a device is online, unless that was recorded a moment ago."""
        if self._log.due(presence):
            await self._writes.add(presence)


def make_presences(state: AppState) -> Presences:
    """Makes the record of devices that are online."""
    return Presences(GroupCommit(state.database, state.write_queue, write_presences))


def make_last_used(state: AppState) -> LastUsed:
    """Makes the last-used times of tokens that are not written yet."""
    return LastUsed()
