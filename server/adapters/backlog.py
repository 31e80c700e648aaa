"""Versions that the present key has not signed: an older server's, and all of them after a rotation of the key.

A worker signs them when it starts and now and then, and who rotates the key does; any number may at once. Until then
such a version has no manifest to show, or one signed by the key before. Knows no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from server.adapters.files import MANIFEST
from server.adapters.models import Adapter, StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.signature import make_manifest, sign
from server.db.database import Database
from server.settings import Settings
from server.succession.service import KeyService
from shared.errors import MobizoError
from shared.registry import VersionState
from shared.signing import key_id

BATCH = 100  # versions in a transaction: others write between two
LOOK_SECONDS = 600.0
_log = structlog.get_logger()


def sign_backlog(database: Database, settings: Settings, stopped: Callable[[], bool] = lambda: False) -> int:
    """Signs every version that the present key has not; how many. Raises Unavailable if this host lacks the key."""
    signed = 0
    while not stopped():
        with database.reading() as session:
            current = key_id(KeyService(session, settings).public())
            if not AdapterRepository(session).any_to_sign(current):
                break
        with database.writing() as session:
            key = KeyService(session, settings).private()
            adapters = AdapterRepository(session)
            some = adapters.to_sign(key_id(key.public_key()), BATCH)
            for version, adapter, job in some:
                manifest = version.manifest
                # Always of a job: cohorts came after manifests.
                if manifest is None and job is not None:
                    _lift(adapter, version)
                    manifest = make_manifest(adapter, version, job, None)
                if manifest is not None:
                    sign(version, manifest, key)
            # It holds the signature.
            adapters.forget_files([version.number for version, _, _ in some], MANIFEST)
        signed += len(some)
    return signed


def _lift(adapter: Adapter, version: StoredVersion) -> None:
    """An older server approves whatever comes, and knows no `main`."""
    if version.kept_state is VersionState.APPROVED and version.version > (adapter.main_version or 0):
        adapter.main_version = version.version


class Signing:
    """The signing as a worker does it, between other things."""

    def __init__(self, database: Database, settings: Settings, stopping: Callable[[], bool]) -> None:
        self._database, self._settings, self._stopping = database, settings, stopping
        self._next = time.monotonic()

    def look(self) -> None:
        """Signs what is to be signed, if the last look is long enough ago."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        try:
            signed = sign_backlog(self._database, self._settings, self._stopping)
        except MobizoError as error:
            _log.error("signing-failed", code=error.code, detail=error.detail)
            return
        if signed:
            _log.info("adapters-signed", versions=signed)
