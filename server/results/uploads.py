"""Uploads of adapter files under leases, and the completion of jobs.

An upload is validated completely before it is stored. It is stored before the transaction that records it under its
lease, so that no transaction waits for the store. The lease is checked before the body is read, and again when the
upload is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sqlalchemy.orm import Session

from server.federation.rounds import RoundService
from server.federation.updates import ExpectedUpdate, UpdateService, measure
from server.identity.quotas import QuotaService
from server.identity.signing_keys.service import KeyService
from server.jobs.leases.repository import Ending, JobLease
from server.jobs.leases.service import LeaseService
from server.jobs.repository import Job
from server.jobs.service import JobLifecycle
from server.registry.service import AdapterService, Publication
from server.registry.trajectories.service import Proof, check_sent, record
from server.settings import Settings
from server.storage.store import ArtifactStore, StagingFile, hold
from server.web.state import AppState
from shared.errors import Conflict, Gone, InvalidUpload
from shared.federation.cohort import RoundReceipt
from shared.federation.secure_aggregation.redaction import redacted_result
from shared.federation.update import euclidean_norm
from shared.job import JobState
from shared.protocol import AdapterVersion, Completion, UploadReceipt
from shared.zo.lora import F32, HEADER_BYTES, map_adapter

MAX_RMS = 100.0  # of an uploaded adapter's elements


def check_scale(flat: F32) -> None:
    """Raises InvalidUpload if the root mean square of flat B (D,) is larger than training yields."""
    rms = euclidean_norm(flat) / flat.size**0.5
    if rms > MAX_RMS:
        raise InvalidUpload(
            f"the adapter's elements have a root mean square of {rms:.3g}; at most {MAX_RMS:.3g} is accepted: "
            "training diverged, lower lr"
        )


@dataclass(frozen=True)
class ExpectedAdapter:
    """The requirements on the adapter file of a lease: D, and what an update of a cohort's round must be."""

    size: int
    update: ExpectedUpdate | None

    @property
    def limit(self) -> int:
        """The maximum size of the file, bytes."""
        return 4 * self.size + HEADER_BYTES


def expect_adapter(session: Session, lease_seconds: float, device_id: str, lease_id: str) -> ExpectedAdapter:
    """Returns what may be uploaded under a lease. Raises NotFound, Gone, RoundClosed or NotAMember."""
    leases = LeaseService(session, lease_seconds)
    lease, job = leases.find(device_id, lease_id)
    update = None
    if lease.ending is not Ending.COMPLETED:
        # First, because its error explains why a round no longer accepts the file.
        update = UpdateService(session).expect(job)
        leases.renew(lease)
        QuotaService(session).check_stored(job.tenant, more=1)
    return ExpectedAdapter(leases.manifest(job).manifest.size, update)


def check_adapter(artifacts: ArtifactStore, expected: ExpectedAdapter, staged: StagingFile) -> float | None:
    """Checks an adapter file, outside transactions. Returns the norm of an update; None for a job outside of rounds.

    Raises InvalidUpload, and for an update as `measure`.
    """
    flat = map_adapter(staged.path, expected.size)
    check_scale(flat)
    return None if expected.update is None else measure(artifacts, expected.update, staged.path, flat)


def record_upload(
    session: Session,
    state: AppState,
    device_id: str,
    lease_id: str,
    receipt: UploadReceipt,
    kind: Literal["upload", "trajectory"],
    norm: float | None,
) -> str | None:
    """Records a stored file under its lease. Returns the sha256 of the file that it replaces; None if it replaces none.

    kind: of the columns of the lease. norm: of an update of a round. Repeating an upload changes nothing. Raises
    NotFound, Gone or Collected.
    """
    leases = LeaseService(session, state.settings.lease_seconds)
    lease, _ = leases.find(device_id, lease_id)
    replaced: str | None = getattr(lease, f"{kind}_sha256")
    if lease.ending is Ending.COMPLETED:
        if replaced != receipt.sha256:
            raise Gone(f"the job was completed without this {'adapter file' if kind == 'upload' else kind}")
        return None
    leases.renew(lease)
    hold(session, state.artifacts, [receipt.sha256])
    setattr(lease, f"{kind}_sha256", receipt.sha256)
    setattr(lease, f"{kind}_size", receipt.size)
    if kind == "upload":
        lease.upload_norm = norm
    return None if replaced == receipt.sha256 else replaced


def complete(
    session: Session, settings: Settings, device_id: str, lease_id: str, completion: Completion, proof: Proof | None
) -> AdapterVersion | RoundReceipt:
    """Publishes the uploaded file as the adapter's next version, and ends the job and its lease.

    The file of a job that belongs to a cohort's round counts in the round instead. Completing a job a second time
    returns the same answer and changes nothing.

    proof: of the trajectory that the completion names. Raises NotFound, Gone, Conflict if a file was not uploaded, or
    Unavailable if this host lacks the signing key.
    """
    # The order of locks is described in server.database.database: signing key, cohort, device, job.
    key = KeyService(session, settings).private()
    leases, updates = LeaseService(session, settings.lease_seconds), UpdateService(session)
    updates.lock(lease_id)
    lease, job = leases.find(device_id, lease_id)
    if job.round is not None:
        return _complete_part(session, updates, leases, lease, job, completion, proof)
    adapters = AdapterService(session)
    if lease.ending is Ending.COMPLETED:
        _check_same(lease, completion)
        return adapters.version_of_job(job)
    _check_uploaded(leases, lease, completion, proof)
    publication = Publication(
        program=leases.manifest(job).manifest,
        completion=completion,
        size=lease.upload_size or 0,
        device_id=device_id,
        parent=job.start,
        trajectory_size=0 if proof is None else proof.size,
    )
    stored = adapters.publish(job, publication, key)
    if proof is not None:
        record(session, job.id, proof)
        stored = adapters.version_of_job(job)
    leases.end(lease, Ending.COMPLETED)
    JobLifecycle(session).move(
        job, JobState.SUCCEEDED, result=completion.result, adapter_version=stored.version, error=None
    )
    return stored


def _complete_part(
    session: Session,
    updates: UpdateService,
    leases: LeaseService,
    lease: JobLease,
    job: Job,
    completion: Completion,
    proof: Proof | None,
) -> RoundReceipt:
    """Counts the uploaded file as a member's update; the last update ends the round."""
    if updates.is_masked(job):
        return _complete_masked(session, updates, leases, lease, job, completion)
    if lease.ending is Ending.COMPLETED:
        _check_same(lease, completion)
        return updates.receipt(job)
    updates.expect(job)
    _check_uploaded(leases, lease, completion, proof)
    cohort = updates.count(job, lease, completion.result)
    leases.end(lease, Ending.COMPLETED)
    JobLifecycle(session).move(job, JobState.SUCCEEDED, result=completion.result, error=None)
    RoundService(session).end_if_due(cohort)
    return updates.receipt(job)


def _complete_masked(
    session: Session, updates: UpdateService, leases: LeaseService, lease: JobLease, job: Job, completion: Completion
) -> RoundReceipt:
    """Ends the job of a device whose masked vector is in the sum of its round."""
    if lease.ending is not Ending.COMPLETED:
        leases.renew(lease)
        updates.check_summed(job, lease.device_id)
        leases.end(lease, Ending.COMPLETED)
        JobLifecycle(session).move(job, JobState.SUCCEEDED, result=redacted_result(completion.result), error=None)
    return updates.receipt(job)


def _check_same(lease: JobLease, completion: Completion) -> None:
    """Raises Conflict if a completed job was completed with another file."""
    if lease.upload_sha256 != completion.adapter_sha256:
        raise Conflict("the job was completed with another adapter file")


def _check_uploaded(leases: LeaseService, lease: JobLease, completion: Completion, proof: Proof | None) -> None:
    """Extends the lease. Raises Conflict unless the files that a completion names were uploaded under it, or Gone."""
    leases.renew(lease)
    if lease.upload_sha256 != completion.adapter_sha256:
        raise Conflict(f"the file {completion.adapter_sha256} was not uploaded under this lease; upload it first")
    if proof is None:
        lease.trajectory_sha256 = lease.trajectory_size = None
    else:
        check_sent(lease, completion)
