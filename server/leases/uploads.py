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
from server.db.database import Database
from server.history.recording import Proof, check_sent, record
from server.jobs.lifecycle import JobLifecycle
from server.leases.models import Ending
from server.leases.service import LeaseService
from server.settings import Settings
from server.succession.service import KeyService
from shared.canonical import sha256_hex
from shared.errors import Conflict, Gone, InvalidUpload
from shared.job import JobState
from shared.lora import F32, HEADER_BYTES, load_adapter
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
            leases.hold(lease)
        size = leases.manifest(job).manifest.size
        return size, 4 * size + HEADER_BYTES

    def upload(self, device_id: str, lease_id: str, size: int, data: bytes) -> UploadReceipt:
        """Stores an adapter file of `size` elements under a lease; the same again is the same receipt.

        Raises InvalidUpload, NotFound or Gone, with nothing stored.
        """
        check_scale(load_adapter(data, size), self.rms_limit)
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
            lease.upload_sha256, lease.upload_size = receipt.sha256, receipt.size
        return receipt


def complete(
    session: Session, settings: Settings, device_id: str, lease_id: str, completion: Completion, proof: Proof | None
) -> AdapterVersion:
    """Makes the uploaded file the adapter's next version and ends job and lease; said twice, it counts once.

    proof: of the trajectory that the completion names. Raises NotFound, Gone, Conflict if a file was not uploaded, or
    Unavailable if this host lacks the key that signs.
    """
    # First, as a rotation of the key holds it while it changes what belongs to devices.
    key = KeyService(session, settings).private()
    leases, adapters = LeaseService(session, settings.lease_seconds), AdapterService(session)
    lease, job = leases.find(device_id, lease_id)
    if lease.ending is Ending.COMPLETED:
        if lease.upload_sha256 != completion.adapter_sha256:
            raise Conflict("the job was completed with another adapter file")
        return adapters.version_of_job(job)
    leases.hold(lease)
    if lease.upload_sha256 != completion.adapter_sha256:
        raise Conflict(f"the file {completion.adapter_sha256} was not uploaded under this lease; upload it first")
    if proof is None:
        lease.trajectory_sha256 = lease.trajectory_size = None
    else:
        check_sent(lease, completion)
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
