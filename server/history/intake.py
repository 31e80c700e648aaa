"""Taking a trajectory from a device, under its lease. Knows no HTTP.

It is read whole and held against the lease's job before any of it is stored; whether it yields B is seen when the
device completes the job (`server.history.proof`).
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.cohorts.updates import UpdateService
from server.db.database import Database
from server.history.repository import HistoryRepository
from server.jobs.models import Job
from server.jobs.starts import StartService
from server.leases.models import Ending
from server.leases.service import LeaseService
from server.settings import Settings
from shared.canonical import sha256_hex
from shared.errors import Gone, InvalidTrajectory, StartDeleted
from shared.federation.algorithms import DeviceHalf, find
from shared.job import TrainingSettings
from shared.ledger import check_run, ledger_limit, read_ledger
from shared.program import ProgramManifest
from shared.protocol import UploadReceipt
from shared.trajectory import TrajectoryHeader


@dataclass(frozen=True)
class Expected:
    """The run that a lease's trajectory is of. limit: the most bytes that it takes."""

    header: TrajectoryHeader
    training: TrainingSettings
    limit: int


def header_of(session: Session, job: Job, manifest: ProgramManifest) -> TrajectoryHeader:
    """What the header of a trajectory of that job says. Raises InvalidTrajectory if what it goes on from is gone."""
    try:
        start_sha256 = None if job.start is None else StartService(session).file(job).sha256
    except StartDeleted as error:
        raise InvalidTrajectory(f"{error.detail}: nothing is left to replay it from, send the adapter alone") from error
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
    """mu of the pull that a job, or its round, asks of its device; None for a job without."""
    algorithm = None if job.round is None else HistoryRepository(session).algorithm_of(job.tenant, job.round.cohort)
    half = DeviceHalf(job.request.training.proximal) if algorithm is None else find(algorithm).device
    return half.mu if half.pulls else None


@dataclass(frozen=True)
class TrajectoryIntake:
    """Trajectories sent to one server."""

    database: Database
    artifacts: ArtifactStore
    settings: Settings

    def expect(self, session: Session, device_id: str, lease_id: str) -> Expected:
        """What may be sent under a lease. Raises NotFound, or Gone if nothing may be."""
        leases = LeaseService(session, self.settings.lease_seconds)
        lease, job = leases.find(device_id, lease_id)
        if lease.ending is not Ending.COMPLETED:
            leases.hold(lease)
        UpdateService(session).check_clear(job)
        header, training = header_of(session, job, leases.manifest(job).manifest), job.request.training
        limit = min(ledger_limit(training, header.numbers), self.settings.trajectory_bytes)
        return Expected(header, training, limit)

    def check(self, expected: Expected, data: bytes) -> None:
        """Reads a trajectory, which may take a second. Raises InvalidTrajectory."""
        check_run(read_ledger(data), expected.header, expected.training)

    def store(self, device_id: str, lease_id: str, data: bytes) -> UploadReceipt:
        """Stores a trajectory that was checked, under its lease; the same again is the same receipt.

        Raises NotFound or Gone, with nothing stored.
        """
        receipt = UploadReceipt(sha256=sha256_hex(data), size=len(data))
        with self.database.writing() as session:
            leases = LeaseService(session, self.settings.lease_seconds)
            lease, _ = leases.find(device_id, lease_id)
            if lease.ending is Ending.COMPLETED:
                if lease.trajectory_sha256 != receipt.sha256:
                    raise Gone("the job was completed without this trajectory")
                return receipt
            leases.hold(lease)
            self.artifacts.put(data)
            hold(session, self.artifacts, [receipt.sha256])
            lease.trajectory_sha256, lease.trajectory_size = receipt.sha256, receipt.size
        return receipt
