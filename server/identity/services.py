"""The services that routes share in one process to record who calls; `AppState.get` makes each one once."""

from __future__ import annotations

from server.database.write_queue import GroupCommit
from server.identity.devices.presence import Presence, PresenceLog, write_presences
from server.identity.last_used import LastUsed
from server.web.state import AppState


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
