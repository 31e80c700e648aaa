"""The end of what was deleted: once its grace is over, its rows go. Files that nothing else names then go with the
collector's next pass (`server.artifacts.collection`). The audit trail stays.

A worker looks now and then. Any number may: who is first takes some, the others pass by. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import structlog
from sqlalchemy.orm import Session

from server.adapters.audit import SERVER, AuditTrail, Line
from server.adapters.repository import AdapterRepository
from server.clock import utc_now
from server.db.database import Database
from shared.registry import AdapterAction

LOOK_SECONDS = 600.0
BATCH = 50  # adapters and versions in a transaction: others write between two
_log = structlog.get_logger()


class Removal:
    """The removing as a worker does it, between other things."""

    def __init__(self, database: Database, grace: timedelta, stopping: Callable[[], bool]) -> None:
        """grace: how long what was deleted can be taken back."""
        self._database, self._grace, self._stopping = database, grace, stopping
        self._next = time.monotonic()

    def look(self) -> None:
        """Removes what is due, if the last look is long enough ago."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        removed = self.remove()
        if removed:
            _log.info("adapters-removed", versions=removed)

    def remove(self) -> int:
        """Removes what is due; how many versions that were."""
        versions = 0
        while not self._stopping():
            with self._database.writing() as session:
                rows, removed = self._some(session)
            versions += removed
            if not rows:
                break
        return versions

    def _some(self, session: Session) -> tuple[int, int]:
        """Removes some; how many rows of adapters and versions were due, and how many versions went with them."""
        adapters, trail = AdapterRepository(session), AuditTrail(session)
        whole, single = adapters.overdue(utc_now() - self._grace, BATCH)
        gone = [version.number for _, version in single]
        for adapter, version in single:
            trail.add(adapter, SERVER, Line(AdapterAction.REMOVED, version.version))
        for adapter in whole:
            gone += adapters.numbers_of(adapter)
            trail.add(adapter, SERVER, Line(AdapterAction.REMOVED))
        adapters.remove_versions(gone)
        for adapter in whole:
            adapters.remove(adapter)
        return len(whole) + len(single), len(gone)
