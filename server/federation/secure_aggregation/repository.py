"""The tables of masked rounds and all their SQL: a `SecureAggregationStore` with vectors in the artifact store.

Shares and masked vectors are kept until the round has ended. Large columns are loaded on access only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import (
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    LargeBinary,
    String,
    Text,
    exists,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Mapped, Session, mapped_column

from server.database.columns import Document, Numbered, Table, UtcTime, text_enum
from server.database.database import Repository
from server.federation.models import CohortRound, MemberUpdate
from server.jobs.repository import Job
from server.storage.store import ArtifactStore, FileColumn, hold
from shared.federation.cohort import UpdateState
from shared.federation.secure_aggregation.messages import Advertisement, Phase, Roster
from shared.federation.secure_aggregation.session import MemberRow
from shared.federation.secure_aggregation.settings import SecureAggregationParameters
from shared.job import JobState

_OVER = (Phase.SUMMING, Phase.DONE, Phase.FAILED)
ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)


class SecureAggregationRound(Table):
    """A cohort's round whose updates are masked; a `SessionRow`."""

    __tablename__ = "masked_rounds"

    round_number: Mapped[int] = mapped_column(ForeignKey("cohort_rounds.number"), primary_key=True, autoincrement=False)
    parameters: Mapped[SecureAggregationParameters] = mapped_column(Document(SecureAggregationParameters))
    phase_seconds: Mapped[float] = mapped_column(Float)
    least: Mapped[int] = mapped_column()  # minimum number of devices to begin with: the cohort's quorum
    phase: Mapped[Phase] = mapped_column(text_enum(Phase))
    closes_at: Mapped[datetime | None] = mapped_column(UtcTime, index=True)
    why: Mapped[str | None] = mapped_column(Text)
    roster: Mapped[Roster | None] = mapped_column(Document(Roster), deferred=True)


class SecureAggregationMember(Numbered, Table):
    """A device in a masked round; a `MemberRow`."""

    __tablename__ = "masked_members"
    __table_args__ = (Index("ix_masked_members_round", "round_number", "member", unique=True),)

    round_number: Mapped[int] = mapped_column(ForeignKey("masked_rounds.round_number"))
    member: Mapped[str] = mapped_column(ForeignKey("devices.id"))
    job_number: Mapped[int] = mapped_column(ForeignKey("jobs.number"), index=True)
    roster_number: Mapped[int | None] = mapped_column()  # on the roster, from 1
    last_phase: Mapped[Phase] = mapped_column(text_enum(Phase))
    advertisement: Mapped[Advertisement] = mapped_column(Document(Advertisement), deferred=True)
    sealed: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    commitment: Mapped[bytes | None] = mapped_column(LargeBinary)
    vector_sha256: Mapped[str | None] = mapped_column(String(64), index=True)
    signature: Mapped[bytes | None] = mapped_column(LargeBinary)
    seeds: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)
    keys: Mapped[bytes | None] = mapped_column(LargeBinary, deferred=True)


FILES = (FileColumn(SecureAggregationMember.vector_sha256),)


class SecureAggregationRepository(Repository):
    """Queries masked rounds in one session."""

    def get(self, round_number: int) -> SecureAggregationRound | None:
        """Returns a masked round, or None until the first of its devices has taken part."""
        return self._session.get(SecureAggregationRound, round_number)

    def locked(self, round_number: int) -> SecureAggregationRound | None:
        """Like `get`, and locks the masked round with its devices until the transaction ends."""
        return self._one(SecureAggregationRound, SecureAggregationRound.round_number == round_number, lock=True)

    def expects_members(self, round_number: int) -> bool:
        """Returns whether a member may still advertise keys, because the member's job has not ended."""
        advertised = exists().where(
            SecureAggregationMember.round_number == round_number, SecureAggregationMember.job_number == Job.number
        )
        waited_for = MemberUpdate.round_number == round_number, MemberUpdate.state == UpdateState.WAITING
        alive = or_(
            MemberUpdate.job_number.is_(None), Job.state.not_in((*ENDED_BADLY, JobState.SUCCEEDED)) & ~advertised
        )
        statement = select(MemberUpdate.number).outerjoin(Job, Job.number == MemberUpdate.job_number)
        return self._session.scalar(statement.where(*waited_for, alive).limit(1)) is not None

    def failed_members(self, round_number: int) -> list[str]:
        """Returns the devices of a masked round whose job failed or was cancelled."""
        statement = select(SecureAggregationMember.member).join(Job, Job.number == SecureAggregationMember.job_number)
        conditions = SecureAggregationMember.round_number == round_number, Job.state.in_(ENDED_BADLY)
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
