"""The registry: publishing versions and showing them. Knows no HTTP and no files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from server.adapters.approval import ApprovalService
from server.adapters.audit import SERVER, Actor, AuditTrail, Line
from server.adapters.models import Adapter, StoredVersion
from server.adapters.repository import AdapterRepository
from server.adapters.signature import RoundVersion, make_manifest, make_round_manifest, sign
from server.clock import utc_now
from server.jobs.models import Job
from shared.errors import Conflict, Gone
from shared.program import ProgramManifest
from shared.protocol import AdapterVersion, AdapterView, Completion
from shared.registry import AdapterAction, Parent, VersionState


@dataclass(frozen=True)
class Publication:
    """What a device hands in: the program it ran, its result, bytes of the file, who it is, what it began from."""

    program: ProgramManifest
    completion: Completion
    size: int
    device_id: str
    parent: Parent | None = None


class AdapterService:
    """Adapters in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._adapters = AdapterRepository(session)
        self._trail = AuditTrail(session)

    def publish(self, job: Job, publication: Publication, key: Ed25519PrivateKey) -> AdapterVersion:
        """The next version of a job's adapter, signed, and approved or held by the adapter's rule.

        Raises Conflict if the adapter is another user's by now.
        """
        now, completion = utc_now(), publication.completion
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
            device_id=publication.device_id,
            recipe=job.recipe,
            shape=publication.program.shape,
            recipe_id=job.recipe_id,
            a_sha256=publication.program.a_sha256,
            sha256=completion.adapter_sha256,
            size=publication.size,
            size_d=publication.program.size,
            result=completion.result,
            created_at=now,
        )
        sign(version, make_manifest(adapter, version, job, publication.parent), key)
        self._decide(adapter, version, publication.parent)
        self._adapters.add(version)
        return version.view(adapter)

    def publish_round(self, adapter: Adapter, made: RoundVersion, key: Ed25519PrivateKey) -> StoredVersion:
        """The next version of a cohort's adapter, signed; held only where a person approves each version.

        Nobody measured it yet: the devices of the next round do. adapter: locked.
        """
        adapter.versions += 1
        version = StoredVersion(
            adapter_number=adapter.number,
            version=adapter.versions,
            recipe=made.recipe,
            shape=made.shape,
            recipe_id=made.recipe.id,
            a_sha256=made.a_sha256,
            sha256=made.sha256,
            size=made.size,
            size_d=made.size_d,
            result=made.result,
            created_at=utc_now(),
        )
        sign(version, make_round_manifest(adapter, version, made), key)
        automatic = ApprovalService(self._session).of_adapter(adapter).rule.automatic
        self._settle(adapter, version, SERVER, None if automatic else "a person approves each version of this adapter")
        self._adapters.add(version)
        return version

    def _decide(self, adapter: Adapter, version: StoredVersion, parent: Parent | None) -> None:
        objection = ApprovalService(self._session).objection(adapter, version.result, parent)
        self._settle(adapter, version, Actor(version.device_id or ""), objection)

    def _settle(self, adapter: Adapter, version: StoredVersion, actor: Actor, objection: str | None) -> None:
        before = adapter.main_version
        if objection is None:
            version.kept_state = VersionState.APPROVED
            adapter.main_version = version.version
            line = Line(AdapterAction.PUBLISHED, version.version, (before, version.version))
        else:
            version.kept_state, version.message = VersionState.HELD, objection
            line = Line(AdapterAction.HELD, version.version, reason=objection)
        self._trail.add(adapter, actor, line)

    def version_of_job(self, job: Job) -> AdapterVersion:
        """The version that a succeeded job made. Raises Gone once it was removed."""
        found = self._adapters.of_job(job.id)
        if found is None:
            raise Gone("the adapter version that this job made was deleted")
        adapter, version = found
        return version.view(adapter)

    def view(self, adapter: Adapter, grace: timedelta) -> AdapterView:
        """An adapter as the API shows it. grace: that what was deleted is kept."""
        return self.views([adapter], grace)[0]

    def views(self, adapters: Sequence[Adapter], grace: timedelta) -> list[AdapterView]:
        """Adapters as the API shows them."""
        latest, tags = self._adapters.latest(adapters), self._adapters.tags(adapters)
        return [
            AdapterView(
                name=adapter.name,
                user=adapter.user,
                versions=adapter.versions,
                latest=latest[adapter.number].view(adapter) if adapter.number in latest else None,
                main=adapter.main_version,
                tags=tags.get(adapter.number, {}),
                created_at=adapter.created_at,
                removed_after=removed_after(adapter.deleted_at, grace),
            )
            for adapter in adapters
        ]


def removed_after(deleted_at: datetime | None, grace: timedelta) -> datetime | None:
    """When something deleted then is lost for good; None for what was not."""
    return None if deleted_at is None else deleted_at + grace
