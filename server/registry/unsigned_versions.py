"""Signs versions that a previous key has signed, after a rotation of the key.

Workers sign them when they start and periodically, and so does a key rotation; several may do so at once.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from server.database.database import Database
from server.identity.signing_keys.service import KeyService
from server.registry.files import MANIFEST
from server.registry.repository import AdapterRepository
from server.registry.service import sign
from server.settings import Settings
from shared.signing import key_id

BATCH = 100  # versions in one transaction, so that other writers wait only briefly
_log = structlog.get_logger()


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
            some = adapters.to_sign(key_id(key.public_key()), BATCH, lock=True)
            for version in some:
                sign(version, version.manifest, key)
            # The stored manifest file contains the old signature.
            adapters.delete_generated_files([version.number for version in some], MANIFEST)
        signed += len(some)
    if signed:
        _log.info("adapters-signed", versions=signed)
    return signed
