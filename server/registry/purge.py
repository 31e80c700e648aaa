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


def purge_adapters(database: Database, grace: timedelta, stopped: Callable[[], bool] = lambda: False) -> int:
    """Removes what was deleted longer than `grace` ago. Returns the number of versions. For a sweep of any worker."""
    versions, rows = 0, 1
    while rows and not stopped():
        with database.writing() as session:
            rows, removed = _purge_some(session, grace)
        versions += removed
    if versions:
        _log.info("adapters-removed", versions=versions)
    return versions


def _purge_some(session: Session, grace: timedelta) -> tuple[int, int]:
    """Removes one batch. Returns the numbers of overdue rows and of removed versions."""
    adapters, trail = AdapterRepository(session), AuditTrail(session)
    whole, single = adapters.overdue(utc_now() - grace, BATCH)
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
