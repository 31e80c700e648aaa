"""The registry: adding versions and finding them. Knows no HTTP and no files."""

from __future__ import annotations

from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.adapters.repository import AdapterRepository
from server.clock import utc_now
from server.jobs.models import Job
from shared.errors import Conflict, NotFound
from shared.program import ProgramManifest
from shared.protocol import AdapterVersion, AdapterView, Completion


class AdapterService:
    """Adapters in one transaction."""

    def __init__(self, session: Session) -> None:
        self._adapters = AdapterRepository(session)

    def add_version(
        self, job: Job, manifest: ProgramManifest, completion: Completion, size: int, device_id: str
    ) -> AdapterVersion:
        """The next version of a job's adapter, `size` bytes of file. Raises Conflict if it is another user's by now."""
        now = utc_now()
        adapter = self._adapters.get_locked(job.tenant, job.adapter)
        if adapter is None:
            adapter = Adapter(tenant=job.tenant, name=job.adapter, user=job.user, versions=0, created_at=now)
            self._adapters.add(adapter)
        if adapter.user != job.user:
            raise Conflict(f"adapter {adapter.name!r} is another user's")
        adapter.versions += 1
        version = StoredVersion(
            adapter_number=adapter.number,
            version=adapter.versions,
            job_id=job.id,
            device_id=device_id,
            recipe=job.recipe,
            shape=manifest.shape,
            recipe_id=job.recipe_id,
            a_sha256=manifest.a_sha256,
            sha256=completion.adapter_sha256,
            size=size,
            size_d=manifest.size,
            result=completion.result,
            created_at=now,
        )
        self._adapters.add(version)
        return version.view(adapter)

    def version_of_job(self, job: Job) -> AdapterVersion:
        """The version that a succeeded job made."""
        adapter, version = self._adapters.of_job(job.id)
        return version.view(adapter)

    def get(self, tenant: str, name: str) -> AdapterView:
        """An adapter with its latest version. Raises NotFound."""
        return self.view(self._adapter(tenant, name))

    def view(self, adapter: Adapter) -> AdapterView:
        """An adapter as the API shows it."""
        return AdapterView(
            name=adapter.name,
            user=adapter.user,
            versions=adapter.versions,
            latest=self._version(adapter, adapter.versions).view(adapter),
            created_at=adapter.created_at,
        )

    def version(self, tenant: str, name: str, version: int) -> tuple[Adapter, StoredVersion]:
        """One version and its adapter. Raises NotFound."""
        adapter = self._adapter(tenant, name)
        return adapter, self._version(adapter, version)

    def _adapter(self, tenant: str, name: str) -> Adapter:
        adapter = self._adapters.get(tenant, name)
        if adapter is None:
            raise NotFound(f"there is no adapter {name!r}")
        return adapter

    def _version(self, adapter: Adapter, number: int) -> StoredVersion:
        version = self._adapters.version(adapter, number)
        if version is None:
            raise NotFound(f"adapter {adapter.name!r} has no version {number}; its latest is {adapter.versions}")
        return version
