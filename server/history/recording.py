"""Noting with a version the trajectory that it came with. Knows no HTTP, no files and no replay."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from server.history.models import StoredTrajectory
from server.history.repository import HistoryRepository
from server.leases.models import JobLease
from shared.errors import Conflict
from shared.protocol import Completion


@dataclass(frozen=True)
class Proof:
    """What is known of a trajectory and the adapter file that belongs to it.

    head: the file's bytes before its numbers. verified: the trajectory yields it. made: the file, if it was not
    uploaded and is made of the trajectory.
    """

    sha256: str
    size: int
    steps: int
    start_sha256: str | None
    head: bytes
    verified: bool
    made: bytes | None = None


def check_sent(lease: JobLease, completion: Completion) -> None:
    """Raises Conflict unless the trajectory that a completion names was sent under the lease."""
    if completion.trajectory_sha256 != lease.trajectory_sha256:
        raise Conflict(
            f"the trajectory {completion.trajectory_sha256} was not uploaded under this lease; upload it first"
        )


def record(session: Session, job_id: str, proof: Proof, *, instead: bool) -> None:
    """Adds the trajectory to the version that a job has just made.

    instead: keep it in place of the LoRA-B file, where that can be made of it.
    """
    history = HistoryRepository(session)
    version = history.of_job(job_id)
    # A run that started elsewhere depends on a version that may be deleted: its B stays.
    alone = proof.verified and proof.start_sha256 is None
    version.verified = proof.verified
    version.by_ledger = instead and alone and proof.size + len(proof.head) < version.size
    history.add(
        StoredTrajectory(
            version_number=version.number,
            sha256=proof.sha256,
            size=proof.size,
            steps=proof.steps,
            start_sha256=proof.start_sha256,
            head=proof.head,
        )
    )
