"""Trajectories of versions: recorded when a job is completed, and shown."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.jobs.leases.models import JobLease
from server.registry.repository import resolve
from server.registry.trajectories.models import StoredTrajectory
from server.registry.trajectories.repository import TrajectoryRepository
from shared.errors import Conflict, NotFound
from shared.protocol import Completion, TrajectoryView


@dataclass(frozen=True)
class Proof:
    """A checked trajectory and its adapter file.

    head: the bytes of the file before its numbers. verified: the trajectory yields the file. rebuilt: the file, if the
    device did not upload it and it was rebuilt from the trajectory.
    """

    sha256: str
    size: int
    steps: int
    start_sha256: str | None
    head: bytes
    verified: bool
    rebuilt: bytes | None = None


def check_sent(lease: JobLease, completion: Completion) -> None:
    """Raises Conflict unless the trajectory that a completion names was uploaded under the lease."""
    if completion.trajectory_sha256 != lease.trajectory_sha256:
        raise Conflict(
            f"the trajectory {completion.trajectory_sha256} was not uploaded under this lease; upload it first"
        )


def record(session: Session, job_id: str, proof: Proof, *, instead: bool) -> None:
    """Adds the trajectory to the version that a job has just made.

    instead: store it instead of the LoRA-B file, if the file can be rebuilt from it and is larger.
    """
    trajectories = TrajectoryRepository(session)
    version = trajectories.of_job(job_id)
    # A run that continued another version depends on that version, which may be deleted, so its B is kept.
    is_self_contained = proof.verified and proof.start_sha256 is None
    version.verified = proof.verified
    version.from_trajectory = instead and is_self_contained and proof.size + len(proof.head) < version.size
    trajectories.add(
        StoredTrajectory(
            version_number=version.number,
            sha256=proof.sha256,
            size=proof.size,
            steps=proof.steps,
            start_sha256=proof.start_sha256,
            head=proof.head,
        )
    )


class TrajectoryService:
    """Trajectories in one transaction."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def view(self, tenant: str, name: str, version: int) -> TrajectoryView:
        """Returns the trajectory of a version. Raises AdapterNotFound, RevisionNotFound or NotFound."""
        adapter, stored = resolve(self._session, tenant, name, f"v{version}")
        found = TrajectoryRepository(self._session).of_version(stored)
        if found is None:
            raise NotFound(f"version {version} of adapter {name!r} came without a trajectory")
        return TrajectoryView(
            adapter=adapter.name,
            version=stored.version,
            sha256=found.sha256,
            size=found.size,
            steps=found.steps,
            verified=stored.verified,
            instead=stored.from_trajectory,
            start_sha256=found.start_sha256,
        )
