"""Finds adapters as repositories: by caller, `tenant/name`, revision and path."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.registry.files import AdapterFile, find, listing
from server.registry.hub.refusals import NotReleased
from server.registry.models import Adapter, StoredVersion
from server.registry.repository import find_adapter, find_version
from server.web.state import AppState
from shared.errors import AdapterNotFound, FileNotInAdapter, RevisionNotFound, UnsupportedFormat
from shared.registry import MAIN

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")  # there are no folders, so nothing leads out of one


@dataclass(frozen=True)
class Snapshot:
    """An adapter at one of its versions."""

    adapter: Adapter
    version: StoredVersion
    commit: str  # 40 hex digits

    @property
    def id(self) -> str:
        """tenant/name."""
        return f"{self.adapter.tenant}/{self.adapter.name}"


@dataclass(frozen=True)
class HubReader:
    """The repositories that a caller of one tenant may read."""

    state: AppState
    caller: str

    def snapshot(self, tenant: str, name: str, revision: str) -> Snapshot:
        """An adapter at a revision.

        Raises AdapterNotFound, the same for another tenant's, RevisionNotFound, or NotReleased if it has no `main`.
        """
        with self.state.database.reading() as session:
            adapter = self._adapter(session, tenant, name)
            try:
                version = find_version(session, adapter, revision)
            except RevisionNotFound:
                if revision == MAIN:
                    raise NotReleased from None
                raise
            commit = version.revision
            session.expunge_all()
        return Snapshot(adapter, version, commit)

    def _adapter(self, session: Session, tenant: str, name: str) -> Adapter:
        if tenant == self.caller:
            with suppress(AdapterNotFound):
                return find_adapter(session, tenant, name)
        raise AdapterNotFound(f"there is no adapter {tenant[:100]}/{name[:100]} here, or it is not yours")

    def files(self, snapshot: Snapshot) -> list[AdapterFile]:
        """Returns the listed files, which are generated at the first request."""
        return listing(self.state, snapshot.version)

    def file(self, snapshot: Snapshot, path: str) -> AdapterFile:
        """Returns a file, listed or not. Raises FileNotInAdapter."""
        if not _FILE.fullmatch(path):
            raise self.absent(snapshot)
        try:
            return find(self.state, snapshot.version, path)
        except FileNotInAdapter:
            raise self.absent(snapshot) from None
        except UnsupportedFormat as error:
            # An unsupported format counts as a missing file, because clients try several file names.
            raise FileNotInAdapter(error.detail, revision=snapshot.commit) from None

    @staticmethod
    def absent(snapshot: Snapshot) -> FileNotInAdapter:
        """Returns the error for a missing path."""
        return FileNotInAdapter(f"version {snapshot.version.version} has no such file", revision=snapshot.commit)
