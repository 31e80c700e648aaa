"""All SQL of masked rounds: a `SecureAggregationStore` with rows in the database and vectors in the artifact store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import Session

from server.database.database import Repository, add_if_absent, locked
from server.federation.models import CohortRound, MemberUpdate
from server.federation.secure_aggregation.models import SecureAggregationMember, SecureAggregationRound
from server.jobs.repository import Job
from server.storage.store import ArtifactStore, hold
from shared.federation.cohort import UpdateState
from shared.federation.secure_aggregation.messages import Advertisement, Phase
from shared.federation.secure_aggregation.session import MemberRow
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.job import JobState

_OVER = (Phase.SUMMING, Phase.DONE, Phase.FAILED)
_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)


class SecureAggregationRepository(Repository):
    """Queries masked rounds in one session."""

    def round_of(self, job: Job) -> CohortRound | None:
        """Returns the round that a job was submitted for, or None."""
        part = MemberUpdate, MemberUpdate.round_number == CohortRound.number
        return self._session.scalar(select(CohortRound).join(*part).where(MemberUpdate.job_number == job.number))

    def get(self, round_number: int) -> SecureAggregationRound | None:
        """Returns a masked round, or None until the first of its devices has taken part."""
        return self._session.get(SecureAggregationRound, round_number)

    def of_round(self, round_id: str) -> SecureAggregationRound | None:
        """Returns the masked round of a cohort's round, by the id of the latter."""
        statement = select(SecureAggregationRound).join(
            CohortRound, CohortRound.number == SecureAggregationRound.round_number
        )
        return self._session.scalar(statement.where(CohortRound.id == round_id))

    def locked(self, round_number: int) -> SecureAggregationRound | None:
        """Like `get`, and locks the masked round with its devices until the transaction ends."""
        return self._one(SecureAggregationRound, SecureAggregationRound.round_number == round_number, lock=True)

    def begin(
        self, cohort_round: CohortRound, parameters: SecureAggregationParameters, phase_seconds: float, least: int
    ) -> SecureAggregationRound:
        """Returns the masked round of a cohort's round, locked. Creates it if it is absent."""
        add_if_absent(
            self._session,
            SecureAggregationRound,
            round_number=cohort_round.number,
            parameters=parameters,
            phase_seconds=phase_seconds,
            least=least,
            phase=Phase.KEYS,
            closes_at=cohort_round.deadline,
        )
        return self._session.scalars(
            locked(select(SecureAggregationRound).where(SecureAggregationRound.round_number == cohort_round.number))
        ).one()

    def expects_members(self, round_number: int) -> bool:
        """Returns whether a member may still advertise keys, because the member's job has not ended."""
        advertised = exists().where(
            SecureAggregationMember.round_number == round_number, SecureAggregationMember.job_number == Job.number
        )
        waited_for = MemberUpdate.round_number == round_number, MemberUpdate.state == UpdateState.WAITING
        alive = or_(
            MemberUpdate.job_number.is_(None), Job.state.not_in((*_ENDED_BADLY, JobState.SUCCEEDED)) & ~advertised
        )
        statement = select(MemberUpdate.number).outerjoin(Job, Job.number == MemberUpdate.job_number)
        return self._session.scalar(statement.where(*waited_for, alive).limit(1)) is not None

    def members(self, round_number: int) -> Sequence[SecureAggregationMember]:
        """Returns the devices of a masked round."""
        return self._session.scalars(
            select(SecureAggregationMember).where(SecureAggregationMember.round_number == round_number)
        ).all()

    def failed_members(self, round_number: int) -> list[str]:
        """Returns the devices of a masked round whose job failed or was cancelled."""
        statement = select(SecureAggregationMember.member).join(Job, Job.number == SecureAggregationMember.job_number)
        conditions = SecureAggregationMember.round_number == round_number, Job.state.in_(_ENDED_BADLY)
        return list(self._session.scalars(statement.where(*conditions)))


class DatabaseStore:
    """A `SecureAggregationStore` over the database and the artifact store."""

    def __init__(
        self,
        session: Session,
        masked: SecureAggregationRound,
        artifacts: ArtifactStore | None = None,
        job_number: int = 0,
    ) -> None:
        """masked: locked if the caller makes changes. artifacts: required to store or read vectors.

        job_number: job of the device that is to be added.
        """
        self._session, self.session, self._files, self._job_number = session, masked, artifacts, job_number

    def row(self, member: str) -> SecureAggregationMember | None:
        """Returns the row of a device, or None."""
        return self._session.scalar(
            select(SecureAggregationMember).where(self._mine(), SecureAggregationMember.member == member)
        )

    def rows(self) -> Sequence[SecureAggregationMember]:
        """Returns all rows, sorted by member name."""
        rows = self._session.scalars(select(SecureAggregationMember).where(self._mine())).all()
        # Sorted here because collations differ between databases, and devices verify the order.
        return sorted(rows, key=lambda row: row.member)

    def add(self, member: str, advertisement: Advertisement) -> SecureAggregationMember:
        """Adds and returns the row of a device."""
        row = SecureAggregationMember(
            round_number=self.session.round_number,
            member=member,
            job_number=self._job_number,
            last_phase=Phase.KEYS,
            advertisement=advertisement,
        )
        self._session.add(row)
        self._session.flush()
        return row

    def sealed_shares_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Returns the encrypted share for `number` of each sender, `size` bytes each, and reads nothing else."""
        piece = func.substr(SecureAggregationMember.sealed, (number - 1) * size + 1, size)
        statement = select(SecureAggregationMember.roster_number, piece).where(
            self._mine(), SecureAggregationMember.roster_number.in_(senders)
        )
        by_sender = {roster_number: bytes(sealed) for roster_number, sealed in self._session.execute(statement)}
        return [by_sender[sender] for sender in senders]

    def store_vector(self, row: MemberRow, sha256: str, data: bytes | memoryview) -> None:
        """Records the sha256 of a masked vector, which the artifact store has already."""
        row.vector_sha256 = sha256
        hold(self._session, self._artifacts, [row.vector_sha256])

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """Yields the masked vectors of these rows."""
        return (self._artifacts.read(row.vector_sha256 or "") for row in rows)

    def delete_secrets(self) -> None:
        """Removes all shares and the references to the masked vectors; garbage collection removes the files."""
        nothing = {"sealed": None, "seeds": None, "keys": None, "vector_sha256": None}
        self._session.execute(
            update(SecureAggregationMember).where(self._mine()).values(**nothing),
            execution_options={"synchronize_session": "fetch"},
        )

    @property
    def _artifacts(self) -> ArtifactStore:
        if self._files is None:
            raise RuntimeError("storing or reading masked vectors requires an artifact store")
        return self._files

    def _mine(self) -> ColumnElement[bool]:
        return SecureAggregationMember.round_number == self.session.round_number


def due(now: datetime) -> ColumnElement[bool]:
    """Returns the condition for a round whose current masked phase is past its deadline or whose phases are over."""
    late = or_(SecureAggregationRound.closes_at <= now, SecureAggregationRound.phase.in_(_OVER))
    return exists().where(SecureAggregationRound.round_number == CohortRound.number, late)
