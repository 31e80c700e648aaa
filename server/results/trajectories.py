"""Uploads of trajectories under leases.

A trajectory is checked against the lease's job before any of it is stored. Whether it yields B is verified when the
device completes the job (`server.results.verification`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.database.database import Database
from server.federation.repository import CohortRepository
from server.federation.updates import UpdateService
from server.jobs.leases.models import Ending
from server.jobs.leases.service import LeaseService
from server.jobs.models import Job
from server.registry.warm_start import StartService
from server.settings import Settings
from server.storage.references import hold
from server.storage.store import ArtifactStore
from shared.canonical import sha256_hex
from shared.errors import Gone, InvalidTrajectory, StartDeleted
from shared.federation.algorithms import DeviceHalf, find
from shared.job import TrainingSettings
from shared.program import ProgramManifest
from shared.protocol import UploadReceipt
from shared.trajectory_checks import check_run, ledger_limit
from shared.zo.trajectory import TrajectoryHeader
from shared.zo.trajectory_reader import read_ledger


@dataclass(frozen=True)
class Expected:
    """The run that a lease's trajectory must record. limit: maximum size, bytes."""

    header: TrajectoryHeader
    training: TrainingSettings
    limit: int


def header_of(session: Session, job: Job, manifest: ProgramManifest) -> TrajectoryHeader:
    """Returns the header of a job's trajectory. Raises InvalidTrajectory if the job's start was deleted."""
    try:
        start_sha256 = None if job.start is None else StartService(session).file(job).sha256
    except StartDeleted as error:
        raise InvalidTrajectory(f"{error.detail}: the trajectory cannot be replayed; send the adapter alone") from error
    return TrajectoryHeader(
        job_id=job.id,
        job_seed=job.request.training.seed,
        recipe_id=job.recipe_id,
        noise=manifest.recipe.noise,
        queries=manifest.recipe.queries,
        size=manifest.size,
        start_sha256=start_sha256,
        proximal=_proximal(session, job),
    )


def _proximal(session: Session, job: Job) -> float | None:
    """Returns mu of the pull that a job or its round applies; None for a job without a pull."""
    algorithm = None if job.round is None else CohortRepository(session).algorithm_of(job.tenant, job.round.cohort)
    half = DeviceHalf(job.request.training.proximal) if algorithm is None else find(algorithm).device
    return half.mu if half.pulls else None


@dataclass(frozen=True)
class TrajectoryUploads:
    """Uploads of trajectories to one server."""

    database: Database
    artifacts: ArtifactStore
    settings: Settings

    def expect(self, session: Session, device_id: str, lease_id: str) -> Expected:
        """Returns what may be uploaded under a lease. Raises NotFound, or Gone if the lease has ended."""
        leases = LeaseService(session, self.settings.lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        if lease.ending is not Ending.COMPLETED:
            leases.renew(lease)
        UpdateService(session).check_clear(job)
        header, training = header_of(session, job, leases.manifest(job).manifest), job.request.training
        limit = min(ledger_limit(training, header.numbers), self.settings.trajectory_bytes)
        return Expected(header, training, limit)

    def check(self, expected: Expected, data: bytes) -> None:
        """Checks a trajectory, which may take a second. Raises InvalidTrajectory."""
        check_run(read_ledger(data), expected.header, expected.training)

    def store(self, device_id: str, lease_id: str, data: bytes) -> UploadReceipt:
        """Stores a checked trajectory under its lease. Repeating the upload returns the same receipt.

        Raises NotFound or Gone and stores nothing.
        """
        receipt = UploadReceipt(sha256=sha256_hex(data), size=len(data))
        with self.database.writing() as session:
            leases = LeaseService(session, self.settings.lease_seconds)
            lease, _ = leases.find(device_id, lease_id)
            if lease.ending is Ending.COMPLETED:
                if lease.trajectory_sha256 != receipt.sha256:
                    raise Gone("the job was completed without this trajectory")
                return receipt
            leases.renew(lease)
            self.artifacts.put(data)
            hold(session, self.artifacts, [receipt.sha256])
            lease.trajectory_sha256, lease.trajectory_size = receipt.sha256, receipt.size
        return receipt
