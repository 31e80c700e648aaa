"""Trajectories of versions: their tables and SQL, recording them when a job is completed, and showing them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, ForeignKey, LargeBinary, String, select
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Table, view_of
from server.jobs.leases.repository import JobLease
from server.registry.models import StoredVersion
from server.registry.repository import resolve
from server.storage.store import FileColumn
from shared.errors import Conflict, NotFound
from shared.protocol import Completion, TrajectoryView


class StoredTrajectory(Table):
    """The trajectory that came with a version.

    head: the bytes of the LoRA-B file before its numbers, so that the file can be rebuilt exactly even if a later
    library writes other headers. The version records whether the trajectory is verified and replaces B.
    """

    __tablename__ = "trajectories"

    version_number: Mapped[int] = mapped_column(
        ForeignKey("adapter_versions.number", ondelete="CASCADE"), primary_key=True
    )
    sha256: Mapped[str] = mapped_column(String(64), index=True)
    size: Mapped[int] = mapped_column(BigInteger)
    steps: Mapped[int] = mapped_column()
    start_sha256: Mapped[str | None] = mapped_column(String(64))
    head: Mapped[bytes] = mapped_column(LargeBinary)


FILES = (FileColumn(StoredTrajectory.sha256),)


def trajectory_of(session: Session, version: StoredVersion) -> StoredTrajectory | None:
    """Returns the trajectory of a version."""
    return session.get(StoredTrajectory, version.number)


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


def record(session: Session, job_id: str, proof: Proof) -> None:
    """Adds the trajectory to the version that a job has just made.

    It is kept instead of the LoRA-B file if the file can be rebuilt from it and is larger.
    """
    version = session.scalars(select(StoredVersion).where(StoredVersion.job_id == job_id)).one()
    # A run that continued another version depends on that version, which may be deleted, so its B is kept.
    is_self_contained = proof.verified and proof.start_sha256 is None
    version.verified = proof.verified
    version.from_trajectory = is_self_contained and proof.size + len(proof.head) < version.size
    session.add(
        StoredTrajectory(
            version_number=version.number,
            sha256=proof.sha256,
            size=proof.size,
            steps=proof.steps,
            start_sha256=proof.start_sha256,
            head=proof.head,
        )
    )


def trajectory_view(session: Session, tenant: str, name: str, version: int) -> TrajectoryView:
    """Returns the trajectory of a version. Raises AdapterNotFound, RevisionNotFound or NotFound."""
    adapter, stored = resolve(session, tenant, name, f"v{version}")
    trajectory = trajectory_of(session, stored)
    if trajectory is None:
        raise NotFound(f"version {version} of adapter {name!r} came without a trajectory")
    others = {"adapter": adapter.name, "version": version, "verified": stored.verified}
    return view_of(TrajectoryView, trajectory, **others, replaces_weights=stored.from_trajectory)
