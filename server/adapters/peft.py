"""A version as a PEFT directory: made at the first request, kept in the store since. Knows no HTTP."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from server.adapters.card import model_card
from server.adapters.models import Adapter, StoredPeftFile, StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.service import AdapterService
from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.db.database import Database
from server.formats.peft import write_peft
from server.jobs.repository import JobRepository
from shared.errors import NotFound
from shared.job import JobRequest
from shared.lora import load_adapter
from shared.protocol import PeftFile, PeftListing

CARD = "README.md"


@dataclass(frozen=True)
class PeftService:
    """PEFT directories of one server."""

    database: Database
    artifacts: ArtifactStore

    def listing(self, tenant: str, name: str, version: int) -> PeftListing:
        """The files of a version's PEFT directory. Raises NotFound."""
        with self.database.reading() as session:
            adapter, stored = AdapterService(session).version(tenant, name, version)
            files = AdapterRepository(session).peft_files(stored)
            job = JobRepository(session).get(tenant, stored.job_id)
            session.expunge_all()
        if not files and job is not None:
            files = self._make(adapter, stored, job.request)
        shown = [PeftFile(path=file.path, size=file.size, sha256=file.sha256) for file in files]
        return PeftListing(adapter=name, version=version, files=shown)

    def file(self, tenant: str, name: str, version: int, path: str) -> PeftFile:
        """One of those files. Raises NotFound."""
        for file in self.listing(tenant, name, version).files:
            if file.path == path:
                return file
        raise NotFound(f"version {version} of adapter {name!r} has no PEFT file {path!r}")

    def _make(self, adapter: Adapter, version: StoredVersion, request: JobRequest) -> list[StoredPeftFile]:
        """Writes the files outside of any transaction; of two requests at once, the first to commit counts."""
        flat = load_adapter(self.artifacts.read(version.sha256), version.size_d)
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            write_peft(version.recipe, version.shape, flat, version.a_sha256, directory)
            (directory / CARD).write_text(model_card(adapter, version, request), encoding="utf-8")
            files = [self._store(version, path) for path in sorted(directory.iterdir())]
        with self.database.writing() as session:
            adapters = AdapterRepository(session)
            if not adapters.peft_files(version):
                hold(session, self.artifacts, [file.sha256 for file in files])
                for file in files:
                    adapters.add(file)
        return files

    def _store(self, version: StoredVersion, path: Path) -> StoredPeftFile:
        data = path.read_bytes()
        sha256 = self.artifacts.put(data)
        return StoredPeftFile(version_number=version.number, path=path.name, size=len(data), sha256=sha256)
