"""Asking for merged models and reading them. Knows no HTTP and no converter."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.adapters.resolution import resolve
from server.bases.models import BaseModelEntry
from server.bases.repository import BaseRepository
from server.clock import utc_now
from server.db.upsert import add_if_absent
from server.formats.lifecycle import move
from server.formats.memory import merge_bytes
from server.formats.models import Conversion, ConversionFile, ConversionState
from server.formats.repository import ConversionRepository
from server.identity import new_id
from server.programs.announcement import note_wanted
from server.programs.waiting import WaitingRepository
from shared.errors import BaseMismatch, FileNotInAdapter, NotFound, UnknownBase
from shared.protocol import MergedModel, PeftFile


class MergedService:
    """Merged models in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._conversions = ConversionRepository(session)

    def want(self, tenant: str, name: str, version: int) -> MergedModel:
        """Asks for a version's merged model; made at most once, and tried again if it failed before.

        Raises AdapterNotFound, RevisionNotFound, UnknownBase or BaseMismatch.
        """
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        base = self._base(stored)
        memory_bytes, now = merge_bytes(stored.recipe, stored.shape, base.parameters), utc_now()
        add_if_absent(
            self._session,
            Conversion,
            id=new_id("conversion"),
            version_number=stored.number,
            state=ConversionState.PENDING,
            attempts=0,
            memory_bytes=memory_bytes,
            created_at=now,
        )
        conversion = self._conversions.of_version_locked(stored)
        if conversion.state is ConversionState.FAILED:
            fresh = {"attempts": 0, "error": None, "memory_bytes": memory_bytes, "created_at": now}
            move(conversion, ConversionState.PENDING, **fresh)
        if conversion.state is not ConversionState.READY:
            WaitingRepository(self._session).take_turns(tenant)
            note_wanted(self._session, conversion.id)
        return self._view(adapter, stored, conversion)

    def get(self, tenant: str, name: str, version: int) -> MergedModel:
        """A version's merged model as it stands. Raises AdapterNotFound, RevisionNotFound, or NotFound until wanted."""
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        return self._view(adapter, stored, self._conversion(stored))

    def file(self, tenant: str, name: str, version: int, path: str) -> ConversionFile:
        """A file of a merged model that is ready. Raises as `get` does, or FileNotInAdapter."""
        _, stored = resolve(self._session, tenant, name, f"v{version}")
        for file in self._conversions.files(self._conversion(stored)):
            if file.path == path:
                return file
        raise FileNotInAdapter(f"the merged model of version {version} has no file {path[:200]!r}, or is not ready")

    def _conversion(self, stored: StoredVersion) -> Conversion:
        conversion = self._conversions.of_version(stored)
        if conversion is None:
            raise NotFound(f"no merged model of version {stored.version} was asked for; POST here asks for one")
        return conversion

    def _base(self, stored: StoredVersion) -> BaseModelEntry:
        wanted = stored.recipe.base
        base = BaseRepository(self._session).by_name(wanted.name)
        if base is None:
            raise UnknownBase(f"the base model {wanted.name!r} is not registered any more")
        if base.sha256 != wanted.sha256:
            raise BaseMismatch(
                f"the adapter was trained on {wanted.name!r} of sha256 {wanted.sha256[:12]}..., and that name stands "
                f"for {base.sha256[:12]}... here"
            )
        return base

    def _view(self, adapter: Adapter, stored: StoredVersion, conversion: Conversion) -> MergedModel:
        files = self._conversions.files(conversion)
        return MergedModel(
            adapter=adapter.name,
            version=stored.version,
            state=conversion.state,
            files=[PeftFile(path=file.path, size=file.size, sha256=file.sha256) for file in files],
            error=conversion.error,
            created_at=conversion.created_at,
            ready_at=conversion.ready_at,
        )
