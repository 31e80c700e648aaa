"""All SQL queries for rounds and members' parts in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, exists, func, or_, select, update
from sqlalchemy.orm import joinedload

from server.database.database import Repository
from server.database.paging import PageRequest, PageRows, page_of
from server.federation.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.federation.secure_aggregation.repository import ENDED_BADLY
from server.federation.secure_aggregation.repository import due as masked_due
from server.jobs.repository import Job
from shared.federation.cohort import RoundState, UpdateState

UNDER_WAY = (RoundState.OPEN, RoundState.AGGREGATING)


@dataclass(frozen=True)
class Figures:
    """Aggregated reports of a round's devices: means over the devices that measured, and bytes of accepted updates."""

    measured: int = 0
    start_accuracy: float | None = None
    tuned_accuracy: float | None = None
    upload_bytes: int = 0
    examples: int = 0


class RoundRepository(Repository):
    """Rounds in one session."""

    def get_one(self, round_id: str) -> CohortRound:
        """Returns an existing round, reloaded from the database."""
        statement = select(CohortRound).where(CohortRound.id == round_id)
        return self._session.scalars(statement, execution_options={"populate_existing": True}).one()

    def at(self, cohort: Cohort, position: int) -> CohortRound | None:
        """Returns a round of a cohort by its number within the cohort, or None."""
        return self._one(CohortRound, CohortRound.cohort_number == cohort.number, CohortRound.position == position)

    def open(self, cohort: Cohort) -> CohortRound | None:
        """Returns the open round, or None."""
        return self._one(CohortRound, CohortRound.cohort_number == cohort.number, CohortRound.state == RoundState.OPEN)

    def under_way(self, cohort: Cohort) -> Sequence[CohortRound]:
        """Returns the rounds that have not ended, in order."""
        return self._all(CohortRound, CohortRound.cohort_number == cohort.number, CohortRound.state.in_(UNDER_WAY))

    def latest(self, cohorts: Sequence[Cohort]) -> dict[int, CohortRound]:
        """Returns the latest round of each cohort, by cohort number."""
        newest = (
            select(func.max(CohortRound.number))
            .where(CohortRound.cohort_number.in_([cohort.number for cohort in cohorts]))
            .group_by(CohortRound.cohort_number)
        )
        rounds = self._session.scalars(select(CohortRound).where(CohortRound.number.in_(newest)))
        return {each.cohort_number: each for each in rounds}

    def page(self, cohort: Cohort, request: PageRequest) -> PageRows[CohortRound]:
        """Returns one page of a cohort's rounds, newest first."""
        return page_of(self._session, CohortRound, request, CohortRound.cohort_number == cohort.number)

    def parts_page(self, cohort_round: CohortRound, request: PageRequest) -> PageRows[MemberUpdate]:
        """Returns one page of the members' parts in a round, newest first."""
        mine, related = MemberUpdate.round_number == cohort_round.number, (MemberUpdate.member, MemberUpdate.job)
        return page_of(self._session, MemberUpdate, request, mine, load=map(joinedload, related))

    def figures(self, rounds: Sequence[CohortRound]) -> dict[int, Figures]:
        """Returns the aggregated device reports of each round, by round number."""
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

    def of_job(self, job: Job) -> MemberUpdate:
        """Returns the part that a job of a round was submitted for, with its round and member."""
        statement = select(MemberUpdate).where(MemberUpdate.job_number == job.number)
        related = joinedload(MemberUpdate.round), joinedload(MemberUpdate.member)
        return self._session.scalars(statement.options(*related)).one()

    def parts(self, cohort_round: CohortRound, state: UpdateState) -> Sequence[MemberUpdate]:
        """Returns the parts of a round in one state, with their members, in order."""
        return self._parts(cohort_round, MemberUpdate.state == state)

    def count(self, cohort_round: CohortRound, state: UpdateState) -> int:
        """Returns the number of parts of a round in one state."""
        return self._count(MemberUpdate.round_number == cohort_round.number, MemberUpdate.state == state)

    def without_job(self, cohort_round: CohortRound, limit: int) -> Sequence[MemberUpdate]:
        """Returns up to `limit` parts of a round for which no job was submitted yet, with their members, in order."""
        return self._parts(cohort_round, _jobless(), limit)

    def _parts(
        self, cohort_round: CohortRound, condition: ColumnElement[bool], limit: int | None = None
    ) -> Sequence[MemberUpdate]:
        statement = select(MemberUpdate).where(MemberUpdate.round_number == cohort_round.number, condition)
        statement = statement.options(joinedload(MemberUpdate.member)).order_by(MemberUpdate.number)
        return self._session.scalars(statement.limit(limit)).all()

    def ended_badly(self, cohort_round: CohortRound) -> Sequence[MemberUpdate]:
        """Returns the waiting parts of a round whose job has failed or was cancelled."""
        return self._all(MemberUpdate, MemberUpdate.round_number == cohort_round.number, _lost())

    def under_way_of(self, member: CohortMember) -> Sequence[MemberUpdate]:
        """Returns a member's parts in rounds that have not ended."""
        under_way = MemberUpdate.member_number == member.number, CohortRound.state.in_(UNDER_WAY)
        return self._session.scalars(select(MemberUpdate).join(MemberUpdate.round).where(*under_way)).all()

    def carry(self, old: CohortRound, new: CohortRound) -> int:
        """Moves the waiting parts of a round to the next round and returns their number."""
        conditions = MemberUpdate.round_number == old.number, MemberUpdate.state == UpdateState.WAITING
        carried = self._session.scalars(select(MemberUpdate).where(*conditions)).all()
        for part in carried:
            part.round = new
        self._session.flush()
        return len(carried)

    def forget_files(self, cohort_round: CohortRound) -> None:
        """Drops the references to the updates of a round that has ended; garbage collection removes the files."""
        self._session.execute(
            update(MemberUpdate)
            .where(MemberUpdate.round_number == cohort_round.number)
            .values(sha256=None, start_sha256=None),
            execution_options={"synchronize_session": "fetch"},
        )

    def optimizer_of(self, cohort: Cohort) -> CohortRound | None:
        """Returns the round whose optimizer state the next round continues from, or None."""
        statement = select(CohortRound).where(
            CohortRound.cohort_number == cohort.number, CohortRound.optimizer_sha256.is_not(None)
        )
        return self._session.scalar(statement.order_by(CohortRound.number.desc()).limit(1))

    def published_since(self, cohort: Cohort, version: int) -> int:
        """Returns the number of the cohort's rounds that published a version later than `version`."""
        return self._count(CohortRound.cohort_number == cohort.number, CohortRound.version > version)

    def due(self, now: datetime) -> Sequence[int]:
        """Returns the numbers of cohorts whose open round needs attention.

        Its deadline has passed, one of its jobs failed, a part has no job yet, or a phase of a masked round is over.
        """
        part = select(MemberUpdate.number).where(MemberUpdate.round_number == CohortRound.number)
        late = CohortRound.deadline <= now
        statement = select(CohortRound.cohort_number).where(
            CohortRound.state == RoundState.OPEN,
            or_(late, masked_due(now), exists(part.where(_jobless())), exists(part.where(_lost()))),
        )
        return self._session.scalars(statement.order_by(CohortRound.number)).all()

    def ends(self, cohort: Cohort, now: datetime) -> bool:
        """Returns whether the cohort's open round is past its deadline or has a part whose job failed."""
        cohort_round = self.open(cohort)
        return cohort_round is not None and (cohort_round.deadline <= now or bool(self.ended_badly(cohort_round)))


def _jobless() -> ColumnElement[bool]:
    return (MemberUpdate.state == UpdateState.WAITING) & MemberUpdate.job_number.is_(None)


def _lost() -> ColumnElement[bool]:
    ended = exists().where(Job.number == MemberUpdate.job_number, Job.state.in_(ENDED_BADLY))
    return (MemberUpdate.state == UpdateState.WAITING) & ended
