"""All SQL about rounds and members' parts in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from server.cohorts.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.jobs.models import Job
from server.masking.repository import due as masked_due
from server.programs.models import Worker
from shared.cohort import RoundState, UpdateState
from shared.job import JobState

UNDER_WAY = (RoundState.OPEN, RoundState.AGGREGATING)
_ENDED_BADLY = (JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class Figures:
    """What the devices of a round said: means over those that measured, and bytes that the counted ones sent."""

    measured: int = 0
    start_accuracy: float | None = None
    tuned_accuracy: float | None = None
    upload_bytes: int = 0
    examples: int = 0


@dataclass(frozen=True)
class Part:
    """A member's part in a round, with the job that asks for it."""

    update: MemberUpdate
    member: CohortMember
    round: CohortRound


class RoundRepository:
    """Rounds in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, *rows: CohortRound | MemberUpdate) -> None:
        """Stores new rows."""
        self._session.add_all(rows)
        self._session.flush()

    def at(self, cohort: Cohort, position: int) -> CohortRound | None:
        """A round of a cohort by its number within the cohort."""
        return self._session.scalar(
            select(CohortRound).where(CohortRound.cohort_number == cohort.number, CohortRound.position == position)
        )

    def open(self, cohort: Cohort) -> CohortRound | None:
        """The round that takes updates."""
        return self._session.scalar(
            select(CohortRound).where(CohortRound.cohort_number == cohort.number, CohortRound.state == RoundState.OPEN)
        )

    def under_way(self, cohort: Cohort) -> Sequence[CohortRound]:
        """Rounds that have not ended, in order."""
        statement = select(CohortRound).where(
            CohortRound.cohort_number == cohort.number, CohortRound.state.in_(UNDER_WAY)
        )
        return self._session.scalars(statement.order_by(CohortRound.number)).all()

    def latest(self, cohorts: Sequence[Cohort]) -> dict[int, CohortRound]:
        """The latest round of each cohort, by the cohort's number."""
        newest = (
            select(func.max(CohortRound.number))
            .where(CohortRound.cohort_number.in_([cohort.number for cohort in cohorts]))
            .group_by(CohortRound.cohort_number)
        )
        found = self._session.scalars(select(CohortRound).where(CohortRound.number.in_(newest)))
        return {each.cohort_number: each for each in found}

    def page(self, cohort: Cohort, request: PageRequest) -> PageRows[CohortRound]:
        """Some of a cohort's rounds, newest first."""
        statement = select(CohortRound).where(CohortRound.cohort_number == cohort.number)
        return page_of(self._session, statement, CohortRound, request)

    def parts_page(self, found: CohortRound, request: PageRequest) -> PageRows[MemberUpdate]:
        """Some members' parts in a round, newest first."""
        statement = select(MemberUpdate).where(MemberUpdate.round_number == found.number)
        return page_of(self._session, statement, MemberUpdate, request)

    def figures(self, rounds: Sequence[CohortRound]) -> dict[int, Figures]:
        """What the devices of each round said, by the round's number."""
        counted = MemberUpdate.state == UpdateState.COUNTED
        statement = (
            select(
                MemberUpdate.round_number,
                func.count(MemberUpdate.start_accuracy),
                func.avg(MemberUpdate.start_accuracy),
                func.avg(MemberUpdate.tuned_accuracy),
                func.coalesce(func.sum(MemberUpdate.sent_bytes), 0),
                func.coalesce(func.sum(MemberUpdate.examples), 0),
            )
            .where(MemberUpdate.round_number.in_([each.number for each in rounds]), counted)
            .group_by(MemberUpdate.round_number)
        )
        rows = self._session.execute(statement)
        return {row[0]: Figures(row[1], row[2], row[3], int(row[4]), int(row[5])) for row in rows}

    def of_job(self, job: Job) -> Part | None:
        """The part that a job was made for."""
        statement = (
            select(MemberUpdate, CohortMember, CohortRound)
            .join(CohortMember, CohortMember.number == MemberUpdate.member_number)
            .join(CohortRound, CohortRound.number == MemberUpdate.round_number)
            .where(MemberUpdate.job_number == job.number)
        )
        row = self._session.execute(statement).one_or_none()
        return None if row is None else Part(row[0], row[1], row[2])

    def jobs_of(self, parts: Sequence[MemberUpdate]) -> dict[int, Job]:
        """The jobs of parts, by their numbers."""
        numbers = [part.job_number for part in parts if part.job_number is not None]
        return {job.number: job for job in self._session.scalars(select(Job).where(Job.number.in_(numbers)))}

    def members_of(self, parts: Sequence[MemberUpdate]) -> dict[int, CohortMember]:
        """The members of parts, by their numbers."""
        numbers = [part.member_number for part in parts]
        found = self._session.scalars(select(CohortMember).where(CohortMember.number.in_(numbers)))
        return {member.number: member for member in found}

    def parts(self, found: CohortRound, state: UpdateState) -> Sequence[MemberUpdate]:
        """Parts of a round in one state, in order."""
        statement = select(MemberUpdate).where(MemberUpdate.round_number == found.number, MemberUpdate.state == state)
        return self._session.scalars(statement.order_by(MemberUpdate.number)).all()

    def count(self, found: CohortRound, state: UpdateState) -> int:
        """How many parts of a round are in one state."""
        statement = select(func.count()).where(MemberUpdate.round_number == found.number, MemberUpdate.state == state)
        return self._session.scalars(statement).one()

    def without_job(self, found: CohortRound, limit: int) -> Sequence[Part]:
        """Some parts of a round for which no job was made yet, in order."""
        statement = (
            select(MemberUpdate, CohortMember)
            .join(CohortMember, CohortMember.number == MemberUpdate.member_number)
            .where(MemberUpdate.round_number == found.number, _jobless())
            .order_by(MemberUpdate.number)
            .limit(limit)
        )
        return [Part(part, member, found) for part, member in self._session.execute(statement)]

    def ended_badly(self, found: CohortRound) -> Sequence[MemberUpdate]:
        """Parts of a round that are waited for although their job has failed or was cancelled."""
        statement = select(MemberUpdate).where(MemberUpdate.round_number == found.number, _lost())
        return self._session.scalars(statement.order_by(MemberUpdate.number)).all()

    def under_way_of(self, member: CohortMember) -> Sequence[Part]:
        """A member's parts in rounds that have not ended."""
        statement = (
            select(MemberUpdate, CohortRound)
            .join(CohortRound, CohortRound.number == MemberUpdate.round_number)
            .where(MemberUpdate.member_number == member.number, CohortRound.state.in_(UNDER_WAY))
        )
        return [Part(part, member, found) for part, found in self._session.execute(statement)]

    def carry(self, old: CohortRound, new: CohortRound) -> int:
        """Parts that a round still waits for become the next one's; how many those are."""
        chosen = MemberUpdate.round_number == old.number, MemberUpdate.state == UpdateState.WAITING
        carried = self._session.scalars(select(MemberUpdate).where(*chosen)).all()
        for part in carried:
            part.round_number = new.number
        self._session.flush()
        return len(carried)

    def forget_files(self, found: CohortRound) -> None:
        """A round that has ended needs its updates no more; the collector removes them."""
        self._session.execute(
            update(MemberUpdate)
            .where(MemberUpdate.round_number == found.number)
            .values(sha256=None, start_sha256=None),
            execution_options={"synchronize_session": "fetch"},
        )

    def optimizer_of(self, cohort: Cohort) -> CohortRound | None:
        """The round whose optimizer state the next one goes on from."""
        statement = select(CohortRound).where(
            CohortRound.cohort_number == cohort.number, CohortRound.optimizer_sha256.is_not(None)
        )
        return self._session.scalar(statement.order_by(CohortRound.number.desc()).limit(1))

    def published_since(self, cohort: Cohort, version: int) -> int:
        """How many of the cohort's rounds have published a later version than that."""
        statement = select(func.count()).where(
            CohortRound.cohort_number == cohort.number, CohortRound.version > version
        )
        return self._session.scalars(statement).one()

    def due(self, now: datetime) -> Sequence[int]:
        """Numbers of cohorts with an open round that something is to be done about.

        Its deadline is over, a job of it ended badly, a part has no job yet, or a masked one's phase is over.
        """
        part = select(MemberUpdate.number).where(MemberUpdate.round_number == CohortRound.number)
        late = CohortRound.deadline <= now
        statement = select(CohortRound.cohort_number).where(
            CohortRound.state == RoundState.OPEN,
            or_(late, masked_due(now), exists(part.where(_jobless())), exists(part.where(_lost()))),
        )
        return self._session.scalars(statement.order_by(CohortRound.number)).all()

    def ends(self, cohort: Cohort, now: datetime) -> bool:
        """Whether the cohort's open round is late, or has a part whose job ended badly."""
        found = self.open(cohort)
        return found is not None and (found.deadline <= now or bool(self.ended_badly(found)))

    def held(self, round_id: str, worker_id: str) -> CohortRound | None:
        """The round whose version a worker makes, if it is still that worker's; locked."""
        statement = select(CohortRound).where(
            CohortRound.id == round_id,
            CohortRound.worker_id == worker_id,
            CohortRound.state == RoundState.AGGREGATING,
        )
        return self._session.scalar(locked(statement))

    def claimable(self, round_id: str, now: datetime) -> CohortRound | None:
        """The round, if its version may be made by whoever asks; of one cohort they come in their order. Locked."""
        return self._session.scalar(locked(select(CohortRound).where(CohortRound.id == round_id, _to_claim(now))))

    def any(self, now: datetime) -> bool:
        """Whether a version is to be made, or to be taken back from a worker that fell silent."""
        return self._session.scalar(select(CohortRound.number).where(_to_claim(now)).limit(1)) is not None

    def startable(self, now: datetime, limit: int) -> Sequence[str]:
        """Ids of such rounds."""
        statement = select(CohortRound.id).where(_to_claim(now)).order_by(CohortRound.number)
        return self._session.scalars(statement.limit(limit)).all()

    def in_work(self, pid_space: str) -> Sequence[tuple[CohortRound, Worker]]:
        """Rounds whose version is made where process numbers mean what they do here, and their workers."""
        statement = (
            select(CohortRound, Worker)
            .join(Worker, Worker.id == CohortRound.worker_id)
            .where(CohortRound.state == RoundState.AGGREGATING, Worker.pid_space == pid_space)
        )
        return [(row[0], row[1]) for row in self._session.execute(statement)]


def _jobless() -> ColumnElement[bool]:
    return (MemberUpdate.state == UpdateState.WAITING) & MemberUpdate.job_number.is_(None)


def _lost() -> ColumnElement[bool]:
    ended = exists().where(Job.number == MemberUpdate.job_number, Job.state.in_(_ENDED_BADLY))
    return (MemberUpdate.state == UpdateState.WAITING) & ended


def _can_start(now: datetime) -> ColumnElement[bool]:
    due = or_(CohortRound.next_attempt_at.is_(None), CohortRound.next_attempt_at <= now)
    earlier = aliased(CohortRound)
    first = ~exists().where(
        earlier.cohort_number == CohortRound.cohort_number,
        earlier.state == RoundState.AGGREGATING,
        earlier.number < CohortRound.number,
    )
    return (CohortRound.state == RoundState.AGGREGATING) & CohortRound.worker_id.is_(None) & due & first


def _lapsed(now: datetime) -> ColumnElement[bool]:
    return (CohortRound.state == RoundState.AGGREGATING) & (CohortRound.lease_expires_at < now)


def _to_claim(now: datetime) -> ColumnElement[bool]:
    return or_(_can_start(now), _lapsed(now))
