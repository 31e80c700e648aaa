"""All SQL about masked rounds: a `MaskingStore` whose rows are the database's and whose vectors are stored files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import Session

from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.cohorts.models import Cohort, CohortRound, MemberUpdate
from server.db.locking import locked
from server.db.upsert import add_if_absent
from server.jobs.models import Job
from server.masking.models import MaskedMember, MaskedRound
from shared.cohort import UpdateState
from shared.job import JobState
from shared.masking.messages import Advertisement, Phase
from shared.masking.session import MemberRow
from shared.masking.settings import MaskingParameters

_OVER = (Phase.SUMMING, Phase.DONE, Phase.FAILED)
_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)


class MaskingRepository:
    """Masked rounds in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def round_of(self, job: Job) -> tuple[CohortRound, Cohort] | None:
        """The round that a job was made for, and its cohort."""
        statement = (
            select(CohortRound, Cohort)
            .join(MemberUpdate, MemberUpdate.round_number == CohortRound.number)
            .join(Cohort, Cohort.number == CohortRound.cohort_number)
            .where(MemberUpdate.job_number == job.number)
        )
        row = self._session.execute(statement).one_or_none()
        return None if row is None else (row[0], row[1])

    def get(self, round_number: int) -> MaskedRound | None:
        """A masked round; None until the first of its devices has spoken."""
        return self._session.get(MaskedRound, round_number)

    def of_round(self, round_id: str) -> MaskedRound | None:
        """The masked round of a cohort's round, by that one's id."""
        statement = select(MaskedRound).join(CohortRound, CohortRound.number == MaskedRound.round_number)
        return self._session.scalar(statement.where(CohortRound.id == round_id))

    def locked(self, round_number: int) -> MaskedRound | None:
        """The same, and nobody else changes it or what its devices said until the transaction ends."""
        return self._session.scalar(locked(select(MaskedRound).where(MaskedRound.round_number == round_number)))

    def begin(self, found: CohortRound, parameters: MaskingParameters, phase_seconds: float, least: int) -> MaskedRound:
        """The masked round of a cohort's round, made if it is absent; locked."""
        add_if_absent(
            self._session,
            MaskedRound,
            round_number=found.number,
            parameters=parameters,
            phase_seconds=phase_seconds,
            least=least,
            phase=Phase.KEYS,
            closes_at=found.deadline,
        )
        return self._session.scalars(locked(select(MaskedRound).where(MaskedRound.round_number == found.number))).one()

    def coming(self, round_number: int) -> bool:
        """Whether a member of the round may still come to advertise keys: his job has not ended."""
        here = exists().where(MaskedMember.round_number == round_number, MaskedMember.job_number == Job.number)
        waited_for = MemberUpdate.round_number == round_number, MemberUpdate.state == UpdateState.WAITING
        alive = or_(MemberUpdate.job_number.is_(None), Job.state.not_in((*_ENDED_BADLY, JobState.SUCCEEDED)) & ~here)
        statement = select(MemberUpdate.number).outerjoin(Job, Job.number == MemberUpdate.job_number)
        return self._session.scalar(statement.where(*waited_for, alive).limit(1)) is not None

    def members(self, round_number: int) -> Sequence[MaskedMember]:
        """Devices of a masked round."""
        return self._session.scalars(select(MaskedMember).where(MaskedMember.round_number == round_number)).all()

    def gone(self, round_number: int) -> list[str]:
        """Devices of a masked round whose job has ended with nothing."""
        statement = select(MaskedMember.member).join(Job, Job.number == MaskedMember.job_number)
        mine = MaskedMember.round_number == round_number, Job.state.in_(_ENDED_BADLY)
        return list(self._session.scalars(statement.where(*mine)))


class DatabaseStore:
    """A `MaskingStore`."""

    def __init__(
        self, session: Session, found: MaskedRound, artifacts: ArtifactStore | None = None, job_number: int = 0
    ) -> None:
        """found: locked, where something is to be changed. artifacts: needed where vectors are stored or read.

        job_number: of the device that is to be added.
        """
        self._session, self.session, self._files, self._job_number = session, found, artifacts, job_number

    def row(self, member: str) -> MaskedMember | None:
        """A device's."""
        return self._session.scalar(select(MaskedMember).where(self._mine(), MaskedMember.member == member))

    def rows(self) -> Sequence[MaskedMember]:
        """All, in the order of their members' names."""
        found = self._session.scalars(select(MaskedMember).where(self._mine())).all()
        # Databases order texts each in their own way, and devices check the order.
        return sorted(found, key=lambda row: row.member)

    def add(self, member: str, advertisement: Advertisement) -> MaskedMember:
        """A row for a device that has none."""
        row = MaskedMember(
            round_number=self.session.round_number,
            member=member,
            job_number=self._job_number,
            reached=Phase.KEYS,
            advertisement=advertisement,
        )
        self._session.add(row)
        self._session.flush()
        return row

    def sealed_for(self, number: int, senders: Sequence[int], size: int) -> list[bytes]:
        """Of each sender's sealed shares the one for `number`, `size` bytes each; nothing else of them is read."""
        piece = func.substr(MaskedMember.sealed, (number - 1) * size + 1, size)
        statement = select(MaskedMember.place, piece).where(self._mine(), MaskedMember.place.in_(senders))
        found = {place: bytes(sealed) for place, sealed in self._session.execute(statement)}
        return [found[sender] for sender in senders]

    def keep_vector(self, row: MemberRow, data: bytes) -> None:
        """Keeps a masked vector and notes its sha256 in the row."""
        row.vector_sha256 = self._artifacts.put(data)
        hold(self._session, self._artifacts, [row.vector_sha256])

    def vectors(self, rows: Sequence[MemberRow]) -> Iterator[bytes]:
        """The masked vectors of these rows, one at a time."""
        return (self._artifacts.read(row.vector_sha256 or "") for row in rows)

    def forget(self) -> None:
        """Removes every share that is kept, and the names of the masked vectors, which the collector removes."""
        nothing = {"sealed": None, "seeds": None, "keys": None, "vector_sha256": None}
        self._session.execute(
            update(MaskedMember).where(self._mine()).values(**nothing),
            execution_options={"synchronize_session": "fetch"},
        )

    @property
    def _artifacts(self) -> ArtifactStore:
        if self._files is None:
            raise RuntimeError("masked vectors are to be stored or read, and nobody said where")
        return self._files

    def _mine(self) -> ColumnElement[bool]:
        return MaskedMember.round_number == self.session.round_number


def due(now: datetime) -> ColumnElement[bool]:
    """Whether a cohort's round is a masked one that something is to be done about: a phase or all of it is over."""
    late = or_(MaskedRound.closes_at <= now, MaskedRound.phase.in_(_OVER))
    return exists().where(MaskedRound.round_number == CohortRound.number, late)
