"""What a device hands in: an adapter file under its lease, then the end of the job. Knows no HTTP.

An upload is validated whole before any of it is stored, and again found live before it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sqlalchemy.orm import Session

from server.adapters.service import AdapterService, Publication
from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.cohorts.rounds import RoundService
from server.cohorts.updates import UpdateService, measure
from server.db.database import Database
from server.history.recording import Proof, check_sent, record
from server.jobs.lifecycle import JobLifecycle
from server.jobs.models import Job
from server.jobs.repository import JobRepository
from server.leases.models import Ending, JobLease
from server.leases.repository import LeaseRepository
from server.leases.service import LeaseService
from server.settings import Settings
from server.succession.service import KeyService
from shared.canonical import sha256_hex
from shared.cohort import RoundReceipt
from shared.errors import Conflict, Gone, InvalidUpload
from shared.job import JobState
from shared.lora import F32, HEADER_BYTES, load_adapter
from shared.masking.quiet import quiet_result
from shared.protocol import AdapterVersion, Completion, UploadReceipt


def check_scale(flat: F32, rms_limit: float) -> None:
    """Raises InvalidUpload if flat B (D,) is larger than training makes it, by the root mean square of its elements."""
    rms = float(np.sqrt(np.mean(np.square(flat, dtype=np.float64))))
    if rms > rms_limit:
        raise InvalidUpload(
            f"the adapter's elements have a root mean square of {rms:.3g}; at most {rms_limit:.3g} is taken here: "
            "training diverged, lower lr"
        )


@dataclass(frozen=True)
class UploadService:
    """Uploads to one server."""

    database: Database
    artifacts: ArtifactStore
    lease_seconds: float
    rms_limit: float

    def limit(self, session: Session, device_id: str, lease_id: str) -> tuple[int, int]:
        """(D, most bytes) of the file that a lease's program makes. Raises NotFound, or Gone if it cannot be sent."""
        leases = LeaseService(session, self.lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        if lease.ending is not Ending.COMPLETED:
            UpdateService(session).expect(job)  # says more of a round that has ended than that the lease has
            leases.hold(lease)
        size = leases.manifest(job).manifest.size
        return size, 4 * size + HEADER_BYTES

    def upload(self, device_id: str, lease_id: str, size: int, data: bytes) -> UploadReceipt:
        """Stores an adapter file of `size` elements under a lease; the same again is the same receipt.

        Raises InvalidUpload, NotFound or Gone, with nothing stored.
        """
        flat = load_adapter(data, size)
        check_scale(flat, self.rms_limit)
        norm = self._measure(device_id, lease_id, data, flat)
        receipt = UploadReceipt(sha256=sha256_hex(data), size=len(data))
        with self.database.writing() as session:
            leases = LeaseService(session, self.lease_seconds)
            lease, _ = leases.find(device_id, lease_id)
            if lease.ending is Ending.COMPLETED:
                if lease.upload_sha256 != receipt.sha256:
                    raise Gone("the job was completed with another adapter file")
                return receipt
            leases.hold(lease)
            self.artifacts.put(data)
            hold(session, self.artifacts, [receipt.sha256])
            lease.upload_sha256, lease.upload_size, lease.upload_norm = receipt.sha256, receipt.size, norm
        return receipt

    def _measure(self, device_id: str, lease_id: str, data: bytes, flat: F32) -> float | None:
        """How far flat B (D,) moved in a round, if the job is of one. Raises as `server.cohorts.updates` does."""
        with self.database.reading() as session:
            lease = LeaseRepository(session).seen(device_id, lease_id)
            if lease is None or lease.ending is Ending.COMPLETED:
                return None
            expected = UpdateService(session).expect(JobRepository(session).by_number(lease.job_number))
        return None if expected is None else measure(self.artifacts, expected, data, flat)


def complete(
    session: Session, settings: Settings, device_id: str, lease_id: str, completion: Completion, proof: Proof | None
) -> AdapterVersion | RoundReceipt:
    """Makes the uploaded file the adapter's next version and ends job and lease; said twice, it counts once.

    Of a job that is a member's part in a round, it counts in the round instead.

    proof: of the trajectory that the completion names. Raises NotFound, Gone, Conflict if a file was not uploaded, or
    Unavailable if this host lacks the key that signs.
    """
    # First, as a rotation of the key holds it while it changes what belongs to devices.
    key = KeyService(session, settings).private()
    leases, adapters = LeaseService(session, settings.lease_seconds), AdapterService(session)
    updates = UpdateService(session)
    updates.lock(lease_id)
    lease, job = leases.find(device_id, lease_id)
    if updates.is_masked(job):
        return _end_masked(session, updates, leases, lease, job, completion)
    if lease.ending is Ending.COMPLETED:
        if lease.upload_sha256 != completion.adapter_sha256:
            raise Conflict("the job was completed with another adapter file")
        return adapters.version_of_job(job) if job.round is None else updates.receipt(job)
    updates.expect(job)
    leases.hold(lease)
    if lease.upload_sha256 != completion.adapter_sha256:
        raise Conflict(f"the file {completion.adapter_sha256} was not uploaded under this lease; upload it first")
    if proof is None:
        lease.trajectory_sha256 = lease.trajectory_size = None
    else:
        check_sent(lease, completion)
    if job.round is not None:
        return _count(session, updates, leases, lease, job, completion)
    publication = Publication(
        program=leases.manifest(job).manifest,
        completion=completion,
        size=lease.upload_size or 0,
        device_id=device_id,
        parent=job.start,
    )
    stored = adapters.publish(job, publication, key)
    if proof is not None:
        record(session, job.id, proof, instead=settings.history_instead)
        stored = adapters.version_of_job(job)
    leases.end(lease, Ending.COMPLETED)
    JobLifecycle(session).move(
        job, JobState.SUCCEEDED, result=completion.result, adapter_version=stored.version, error=None
    )
    return stored


def _count(
    session: Session, updates: UpdateService, leases: LeaseService, lease: JobLease, job: Job, completion: Completion
) -> RoundReceipt:
    """The uploaded file counts as a member's update; the round ends if it was the last."""
    cohort = updates.count(job, lease, completion.result)
    leases.end(lease, Ending.COMPLETED)
    JobLifecycle(session).move(job, JobState.SUCCEEDED, result=completion.result, error=None)
    RoundService(session).settle(cohort)
    return updates.receipt(job)


def _end_masked(
    session: Session, updates: UpdateService, leases: LeaseService, lease: JobLease, job: Job, completion: Completion
) -> RoundReceipt:
    """A device whose masked vector is in its round's sum has done its part; said twice, it counts once."""
    if lease.ending is not Ending.COMPLETED:
        leases.hold(lease)
        updates.check_summed(job, lease.device_id)
        leases.end(lease, Ending.COMPLETED)
        JobLifecycle(session).move(job, JobState.SUCCEEDED, result=quiet_result(completion.result), error=None)
    return updates.receipt(job)
