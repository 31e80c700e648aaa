"""Purge: removes the rows of deleted adapters and versions after a grace period.

Garbage collection (`server.storage.garbage_collection`) then removes their unreferenced files. The audit trail stays.
Any number of workers may purge at once: each locks some rows, and the others skip these.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import structlog
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.registry.models import SERVER, AuditEntry, AuditTrail
from server.registry.repository import AdapterRepository
from shared.registry import AdapterAction

BATCH = 50  # adapters and versions in one transaction, so that other writers wait only briefly
_log = structlog.get_logger()


class AdapterPurge:
    """The sweep of a worker that purges deleted adapters."""

    def __init__(self, database: Database, grace: timedelta, stopping: Callable[[], bool]) -> None:
        """grace: how long a deleted adapter or version can be restored."""
        self._database, self._grace, self._stopping = database, grace, stopping

    def run(self) -> None:
        """Purges, and logs how many versions were removed."""
        removed = self.purge()
        if removed:
            _log.info("adapters-removed", versions=removed)

    def purge(self) -> int:
        """Removes all overdue rows and returns the number of versions."""
        versions = 0
        while not self._stopping():
            with self._database.writing() as session:
                rows, removed = self._some(session)
            versions += removed
            if not rows:
                break
        return versions

    def _some(self, session: Session) -> tuple[int, int]:
        """Removes one batch. Returns the numbers of overdue rows and of removed versions."""
        adapters, trail = AdapterRepository(session), AuditTrail(session)
        whole, single = adapters.overdue(utc_now() - self._grace, BATCH)
        version_numbers = [version.number for _, version in single]
        for adapter, version in single:
            trail.add(adapter, SERVER, AuditEntry(AdapterAction.REMOVED, version.version))
        for adapter in whole:
            version_numbers += adapters.numbers_of(adapter)
            trail.add(adapter, SERVER, AuditEntry(AdapterAction.REMOVED))
        adapters.remove_versions(version_numbers)
        for adapter in whole:
            adapters.remove(adapter)
        return len(whole) + len(single), len(version_numbers)
