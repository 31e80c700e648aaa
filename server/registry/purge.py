"""What workers do to the registry from time to time: purge what was deleted, and sign again after a key rotation.

A purge removes the rows of deleted adapters and versions after a grace period; the audit trail stays. Garbage
collection (`server.storage.garbage_collection`) then removes their unreferenced files. A rotation of the key signs the
versions that a previous key has signed, too. Any number of workers may do so at once: each locks some rows, and the
others skip these.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import structlog
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.identity.signing_keys.service import KeyService
from server.registry.files import MANIFEST
from server.registry.models import SERVER, AuditEntry, AuditTrail
from server.registry.repository import AdapterRepository
from server.registry.service import sign
from server.settings import Settings
from shared.registry import AdapterAction
from shared.signing import key_id

# Adapters and versions in one transaction, so that other writers wait only briefly.
PURGE_BATCH, SIGN_BATCH = 50, 100
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
    whole, single = adapters.overdue(utc_now() - grace, PURGE_BATCH)
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


def sign_backlog(database: Database, settings: Settings, stopped: Callable[[], bool] = lambda: False) -> int:
    """Signs every version that the current key has not signed; returns their number.

    Raises Unavailable if this host lacks the key.
    """
    signed = 0
    while not stopped():
        with database.reading() as session:
            current = key_id(KeyService(session, settings).public())
            if not AdapterRepository(session).to_sign(current, 1):
                break
        with database.writing() as session:
            key = KeyService(session, settings).private()
            adapters = AdapterRepository(session)
            some = adapters.to_sign(key_id(key.public_key()), SIGN_BATCH, lock=True)
            for version in some:
                sign(version, version.manifest, key)
            # The stored manifest file contains the old signature.
            adapters.delete_generated_files([version.number for version in some], MANIFEST)
        signed += len(some)
    if signed:
        _log.info("adapters-signed", versions=signed)
    return signed
