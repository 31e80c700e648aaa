"""All SQL about cohorts and their members."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, exists, func, not_, select
from sqlalchemy.orm import Session

from server.cohorts.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.leases.models import JobLease
from shared.cohort import UpdateState


class CohortRepository:
    """Cohorts in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: Cohort | CohortMember) -> None:
        """Stores a new row."""
        self._session.add(row)
        self._session.flush()

    def get(self, tenant: str, name: str) -> Cohort | None:
        """A cohort of a tenant."""
        return self._session.scalar(select(Cohort).where(Cohort.tenant == tenant, Cohort.name == name))

    def get_locked(self, tenant: str, name: str) -> Cohort | None:
        """The same; nobody else changes it, its members or its rounds until the transaction ends."""
        return self._session.scalar(locked(select(Cohort).where(Cohort.tenant == tenant, Cohort.name == name)))

    def by_number(self, number: int) -> Cohort:
        """A cohort that is known to exist."""
        return self._session.get_one(Cohort, number)

    def by_number_locked(self, number: int) -> Cohort:
        """The same; nobody else changes it meanwhile."""
        return self._session.scalars(locked(select(Cohort).where(Cohort.number == number))).one()

    def of_round_locked(self, round_id: str) -> Cohort:
        """The cohort of a round that is known to exist; nobody else changes it meanwhile."""
        number = select(CohortRound.cohort_number).where(CohortRound.id == round_id).scalar_subquery()
        return self._session.scalars(locked(select(Cohort).where(Cohort.number == number))).one()

    def lock_of_lease(self, lease_id: str) -> None:
        """Locks the cohort that a leased job is a part of, if it is of one."""
        statement = (
            select(Cohort)
            .join(CohortRound, CohortRound.cohort_number == Cohort.number)
            .join(MemberUpdate, MemberUpdate.round_number == CohortRound.number)
            .join(JobLease, JobLease.job_number == MemberUpdate.job_number)
            .where(JobLease.id == lease_id)
        )
        self._session.scalars(locked(statement, of=Cohort)).all()

    def page(self, tenant: str, request: PageRequest) -> PageRows[Cohort]:
        """Some of a tenant's cohorts, newest first."""
        return page_of(self._session, select(Cohort).where(Cohort.tenant == tenant), Cohort, request)

    def to_open(self) -> Sequence[int]:
        """Numbers of cohorts whose next round opens by itself and which have none under way."""
        statement = select(Cohort.number).where(Cohort.opens, not_(Cohort.busy)).order_by(Cohort.number)
        return self._session.scalars(statement).all()

    def member(self, cohort: Cohort, user: str) -> CohortMember | None:
        """A user who is in the cohort, or was."""
        return self._session.scalar(
            select(CohortMember).where(CohortMember.cohort_number == cohort.number, CohortMember.user == user)
        )

    def member_of_device(self, cohort: Cohort, device_id: str) -> CohortMember | None:
        """The member for whom a device trains."""
        return self._session.scalar(
            select(CohortMember).where(
                CohortMember.cohort_number == cohort.number,
                CohortMember.device_id == device_id,
                CohortMember.left_at.is_(None),
            )
        )

    def members_page(self, cohort: Cohort, request: PageRequest) -> PageRows[CohortMember]:
        """Some of the users who are in the cohort, newest first."""
        statement = select(CohortMember).where(
            CohortMember.cohort_number == cohort.number, CohortMember.left_at.is_(None)
        )
        return page_of(self._session, statement, CohortMember, request)

    def count_members(self, cohorts: Sequence[Cohort]) -> dict[int, int]:
        """How many users are in each cohort, by its number."""
        statement = (
            select(CohortMember.cohort_number, func.count())
            .where(
                CohortMember.cohort_number.in_([cohort.number for cohort in cohorts]), CohortMember.left_at.is_(None)
            )
            .group_by(CohortMember.cohort_number)
        )
        return {row[0]: row[1] for row in self._session.execute(statement)}

    def count_updates(self, members: Sequence[CohortMember]) -> dict[int, int]:
        """How many updates of each member counted, by the member's number."""
        statement = (
            select(MemberUpdate.member_number, func.count())
            .where(
                MemberUpdate.member_number.in_([member.number for member in members]),
                MemberUpdate.state == UpdateState.COUNTED,
            )
            .group_by(MemberUpdate.member_number)
        )
        return {row[0]: row[1] for row in self._session.execute(statement)}

    def unlisted(self, found: CohortRound) -> Sequence[CohortMember]:
        """Members of the cohort who have no part in a round, in the order in which they joined."""
        return self._session.scalars(select(CohortMember).where(_unlisted(found)).order_by(CohortMember.number)).all()


def _unlisted(found: CohortRound) -> ColumnElement[bool]:
    part = exists().where(MemberUpdate.round_number == found.number, MemberUpdate.member_number == CohortMember.number)
    return (CohortMember.cohort_number == found.cohort_number) & CohortMember.left_at.is_(None) & not_(part)
