"""Which files are named by the database, and the lock between who names files and who removes them. All SQL of both.

Whoever commits a file's name calls `hold` in that transaction; the collector removes files in a transaction that has
called `hold_alone`. So a file is never removed after its name was committed, and never named after it was removed.
"""

from __future__ import annotations

from collections.abc import Collection as Many
from collections.abc import Iterable
from datetime import datetime

from sqlalchemy import CompoundSelect, or_, select, true, union_all, update
from sqlalchemy.orm import Session

from server.adapters.models import StoredPeftFile, StoredVersion
from server.artifacts.models import THE_ONE, Collection
from server.artifacts.store import ArtifactStore
from server.bases.models import BaseModelEntry
from server.calibrations.models import StoredCalibration
from server.cohorts.models import CohortRound, MemberUpdate
from server.formats.models import ConversionFile
from server.history.models import StoredTrajectory
from server.jobs.models import Job
from server.leases.models import Ending, JobLease
from server.masking.models import MaskedMember
from server.programs.models import ProgramBlob
from server.runners.models import Runner
from shared.errors import NotFound, Unavailable
from shared.job import JobState

# Columns that name stored files, and in which rows; runner builds and uploads under way name files, too. The LoRA-B of
# a version that is kept as its trajectory may be removed: it is made again when it is asked for.
NAMES = (
    (ProgramBlob.sha256, true()),
    (BaseModelEntry.tokenizer_sha256, true()),
    (StoredCalibration.sha256, true()),
    (StoredVersion.sha256, StoredVersion.by_ledger.is_(False)),
    (StoredTrajectory.sha256, true()),
    (StoredPeftFile.sha256, true()),
    (ConversionFile.sha256, true()),
    (MemberUpdate.sha256, true()),
    (MemberUpdate.start_sha256, true()),
    (CohortRound.start_sha256, CohortRound.ended_at.is_(None)),
    (CohortRound.optimizer_sha256, true()),
    (MaskedMember.vector_sha256, true()),
)


class Collected(Unavailable):
    """A file was removed before it was named; send it again."""

    code, title = "file-collected", "File collected"


def hold(session: Session, artifacts: ArtifactStore, sha256s: Iterable[str]) -> None:
    """Keeps the collector away until this writing transaction, which names these files, has ended.

    Raises Collected if one of them is not stored any more.
    """
    session.execute(select(Collection.number).where(Collection.number == THE_ONE).with_for_update(read=True))
    for sha256 in sha256s:
        try:
            artifacts.size(sha256)
        except NotFound as error:
            raise Collected(f"the file {sha256} was removed before it was named; send it again") from error


def hold_alone(session: Session) -> None:
    """Waits for all who hold, and keeps others waiting until this writing transaction has ended."""
    session.execute(select(Collection.number).where(Collection.number == THE_ONE).with_for_update())


def named(session: Session, sha256s: Many[str]) -> set[str]:
    """Those of these files that something names."""
    # One statement, so one snapshot: a name that moves from a lease to a version is never missed between two.
    found = set(session.scalars(_named(list(sha256s))))
    for runner in session.scalars(select(Runner)):
        found.add(runner.signed.build.sha256)
    return found & set(sha256s)


def _named(sha256s: list[str]) -> CompoundSelect[str]:
    # An expired lease may live again while its job waits; its upload is then as good as before.
    may_complete = or_(JobLease.ending.is_(None), (JobLease.ending == Ending.EXPIRED) & (Job.state == JobState.READY))
    uploads = [
        select(column).join(Job, Job.number == JobLease.job_number).where(column.in_(sha256s), may_complete)
        for column in (JobLease.upload_sha256, JobLease.trajectory_sha256)
    ]
    return union_all(*(select(column).where(column.in_(sha256s), rows) for column, rows in NAMES), *uploads)


def begin_pass(session: Session, now: datetime, unless_after: datetime | None) -> bool:
    """Notes that a pass begins; False, and it must not, if one began after `unless_after`."""
    statement = update(Collection).where(Collection.number == THE_ONE)
    if unless_after is not None:
        statement = statement.where(or_(Collection.started_at.is_(None), Collection.started_at <= unless_after))
    begun = session.execute(statement.values(started_at=now, ended_at=None).returning(Collection.number))
    return begun.first() is not None


def end_pass(session: Session, now: datetime, deleted: int, freed_bytes: int) -> None:
    """Notes how a pass ended."""
    statement = update(Collection).where(Collection.number == THE_ONE)
    session.execute(statement.values(ended_at=now, deleted=deleted, freed_bytes=freed_bytes))
