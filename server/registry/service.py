"""The registry's rules: publishing versions, approving or holding them, signing and showing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy.orm import Session

from server.database.columns import utc_now, view_of
from server.identity.quotas import QuotaService
from server.jobs.repository import Job
from server.jobs.service import JobSubscriber
from server.registry.models import SERVER, Actor, Adapter, AuditEntry, AuditTrail, StoredVersion, TenantRule
from server.registry.repository import AdapterRepository
from shared.errors import Conflict, Gone
from shared.federation.cohort import CohortOrigin
from shared.job import JobRequest
from shared.program import ProgramManifest
from shared.protocol import AdapterVersion, AdapterView, Completion
from shared.registry import AdapterAction, AdapterManifest, ApprovalRule, Parent, RuleView, VersionState
from shared.result import Result
from shared.signing import sign_adapter
from shared.task import Task
from shared.training_settings import TrainingSettings


def make_manifest(
    adapter: Adapter,
    version: StoredVersion,
    task: Task,
    training: TrainingSettings,
    parent: Parent | None,
    cohort: CohortOrigin | None = None,
) -> AdapterManifest:
    """Returns the manifest of a version."""
    return view_of(
        AdapterManifest,
        version,
        format=1,
        tenant=adapter.tenant,
        adapter=adapter.name,
        user=adapter.user,
        base=version.recipe.base,
        parent=parent,
        cohort=cohort,
        task=task,
        training=training,
    )


def sign(version: StoredVersion, manifest: AdapterManifest, key: Ed25519PrivateKey) -> None:
    """Sets the manifest, revision and signature of a version."""
    signed = sign_adapter(manifest, key)
    version.manifest, version.revision = manifest, manifest.revision
    version.key_id, version.signature = signed.key_id, signed.signature


class ApprovalService:
    """Approval rules in one transaction: an adapter's own, else its tenant's, else the server's."""

    def __init__(self, session: Session) -> None:
        self._adapters = AdapterRepository(session)

    def of_tenant(self, tenant: str) -> RuleView:
        """Returns the rule of a tenant's adapters without a rule of their own."""
        stored = self._adapters.tenant_rule(tenant)
        if stored is None:
            return RuleView(rule=ApprovalRule(), source="server")
        return RuleView(rule=stored.rule, source="tenant")

    def of_adapter(self, adapter: Adapter) -> RuleView:
        """Returns the rule of an adapter."""
        if adapter.rule is None:
            return self.of_tenant(adapter.tenant)
        return RuleView(rule=adapter.rule, source="adapter")

    def set_tenant_rule(self, tenant: str, rule: ApprovalRule | None) -> None:
        """Sets a tenant's rule; None: the server's rule applies."""
        if rule is None:
            self._adapters.delete_tenant_rule(tenant)
        else:
            self._adapters.set_tenant_rule(TenantRule(tenant=tenant, rule=rule))

    def objection(self, adapter: Adapter, version: StoredVersion, parent: Parent | None) -> str | None:
        """Returns the reason why a new version of the adapter is held; None if it is approved.

        A score is the claim of the device that measured it. It may replace only a version of the same device.
        """
        rule = self.of_adapter(adapter).rule
        objection = rule.objection(version.result, self._score(adapter.tenant, parent, version.result))
        if objection is not None:
            return objection
        current = self._adapters.current(adapter)
        if current is None or current.device_id == version.device_id:
            return None
        return f"another device trained version {current.version}; a person approves a version of a different device"

    def _score(self, tenant: str, parent: Parent | None, result: Result) -> float | None:
        """Returns the parent's accuracy if it was measured on the same split as `result`."""
        version = None if parent is None else self._adapters.parent(tenant, parent.adapter, parent.revision)
        if version is None or version.result.accuracy_split != result.accuracy_split:
            return None
        return version.result.tuned_accuracy


@dataclass(frozen=True)
class Publication:
    """A device's result: its program, the completion, bytes of the LoRA-B file, the device, the start.

    trajectory_size: bytes of the trajectory that comes with it.
    """

    program: ProgramManifest
    completion: Completion
    size: int
    device_id: str
    parent: Parent | None = None
    trajectory_size: int = 0


class AdapterService:
    """Adapters in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._adapters = AdapterRepository(session)
        self._trail = AuditTrail(session)

    def publish(self, job: Job, publication: Publication, key: Ed25519PrivateKey) -> AdapterVersion:
        """Publishes the next version of a job's adapter: signs it, and approves or holds it by the adapter's rule.

        Raises Conflict if the adapter belongs to another user, QuotaExceeded.
        """
        completion, program = publication.completion, publication.program
        adapter = self._adapters.get(job.tenant, job.adapter, lock=True)
        if adapter is None:
            adapter = Adapter(tenant=job.tenant, name=job.adapter, user=job.user, versions=0, created_at=utc_now())
            self._adapters.add(adapter)
        if adapter.user != job.user:
            raise Conflict(f"adapter {adapter.name!r} is another user's")
        version = StoredVersion(
            job_id=job.id,
            device_id=publication.device_id,
            recipe=job.recipe,
            shape=program.shape,
            recipe_id=job.recipe_id,
            a_sha256=program.a_sha256,
            sha256=completion.adapter_sha256,
            size=publication.size,
            stored_bytes=publication.size + publication.trajectory_size,
            size_d=program.size,
            result=completion.result,
        )
        self._number(adapter, version)
        sign(version, make_manifest(adapter, version, job.task, job.request.training, publication.parent), key)
        with self._session.no_autoflush:  # the adapter's row is written once, with its new `main`
            objection = ApprovalService(self._session).objection(adapter, version, publication.parent)
        self._store(adapter, version, Actor(publication.device_id), objection)
        QuotaService(self._session).check_stored(job.tenant)
        return version.view(adapter)

    def publish_round(
        self,
        adapter: Adapter,
        version: StoredVersion,
        key: Ed25519PrivateKey,
        *,
        task: Task,
        training: TrainingSettings,
        parent: Parent | None,
        origin: CohortOrigin,
    ) -> None:
        """Publishes the next version of a cohort's adapter, signed. It is held only if a person approves each version.

        Its accuracy is unknown until the devices of the next round measure it. adapter: locked.
        """
        self._number(adapter, version)
        sign(version, make_manifest(adapter, version, task, training, parent, origin), key)
        automatic = ApprovalService(self._session).of_adapter(adapter).rule.automatic
        self._store(adapter, version, SERVER, None if automatic else "a person approves each version of this adapter")

    def _number(self, adapter: Adapter, version: StoredVersion) -> None:
        adapter.versions += 1
        version.adapter_number, version.version, version.created_at = adapter.number, adapter.versions, utc_now()

    def _store(self, adapter: Adapter, version: StoredVersion, actor: Actor, objection: str | None) -> None:
        before = adapter.main_version
        if objection is None:
            version.kept_state = VersionState.APPROVED
            adapter.main_version = version.version
            entry = AuditEntry(AdapterAction.PUBLISHED, version.version, (before, version.version))
        else:
            version.kept_state, version.message = VersionState.HELD, objection
            entry = AuditEntry(AdapterAction.HELD, version.version, reason=objection)
        self._trail.add(adapter, actor, entry)
        self._adapters.add(version)
        QuotaService(self._session).store(adapter.tenant, version.stored_bytes)

    def version_of_job(self, job: Job) -> AdapterVersion:
        """Returns the version that a succeeded job made. Raises Gone once it was purged."""
        row = self._adapters.of_job(job.id)
        if row is None:
            raise Gone("the adapter version that this job made was deleted")
        adapter, version = row
        return version.view(adapter)

    def view(self, adapter: Adapter, grace: timedelta) -> AdapterView:
        """Returns an adapter as the API shows it. grace: how long deleted adapters are kept."""
        return self.views([adapter], grace)[0]

    def views(self, adapters: Sequence[Adapter], grace: timedelta) -> list[AdapterView]:
        """Returns adapters as the API shows them."""
        latest = self._adapters.latest(adapters)
        return [
            AdapterView(
                name=adapter.name,
                user=adapter.user,
                versions=adapter.versions,
                latest=latest[adapter.number].view(adapter) if adapter.number in latest else None,
                main=adapter.main_version,
                created_at=adapter.created_at,
                removed_after=removed_after(adapter.deleted_at, grace),
            )
            for adapter in adapters
        ]


def removed_after(deleted_at: datetime | None, grace: timedelta) -> datetime | None:
    """Returns the time at which a deleted row is purged; None if it was not deleted."""
    return None if deleted_at is None else deleted_at + grace


class RegistrySubscriber(JobSubscriber):
    """Checks in the registry when jobs are submitted, in one transaction."""

    def __init__(self, session: Session) -> None:
        self._adapters = AdapterRepository(session)

    def check_adapter(self, tenant: str, request: JobRequest) -> None:
        """Raises Conflict if the adapter belongs to another user, or was deleted."""
        adapter = self._adapters.get(tenant, request.adapter)
        if adapter is not None and adapter.deleted_at is not None:
            raise Conflict(f"adapter {request.adapter!r} was deleted; restore it, or choose another name")
        if adapter is not None and adapter.user is not None and adapter.user != request.user:
            raise Conflict(f"adapter {request.adapter!r} is user {adapter.user!r}'s; choose another name")
