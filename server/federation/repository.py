"""All SQL queries for cohorts and their members, and the record of what happens to a cohort."""

from __future__ import annotations

from collections.abc import Sequence

import structlog
from sqlalchemy import ColumnElement, Select, and_, exists, func, not_, select
from sqlalchemy.orm import Session

from server.catalog.calibrations.service import names_calibration
from server.database.database import Repository, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.federation.models import Cohort, CohortMember, CohortRound, MemberUpdate
from server.identity.devices.repository import DeviceUser
from server.jobs.leases.repository import JobLease
from server.jobs.service import JobSubscriber
from server.registry.models import Actor, Adapter, AuditEntry, AuditTrail
from server.registry.repository import AdapterRepository
from shared.errors import CohortNotFound, Conflict
from shared.federation.cohort import UpdateState
from shared.job import JobRequest
from shared.registry import AdapterAction

_log = structlog.get_logger()


class CohortRepository(Repository):
    """Cohorts in one session."""

    def get(self, tenant: str, name: str, *, lock: bool = False) -> Cohort | None:
        """Returns a cohort of a tenant, or None. lock: with its members and rounds, until the transaction ends."""
        return self._one(Cohort, Cohort.tenant == tenant, Cohort.name == name, lock=lock)

    def find(self, tenant: str, name: str, *, lock: bool = False) -> Cohort:
        """Like `get`. Raises CohortNotFound."""
        cohort = self.get(tenant, name, lock=lock)
        if cohort is None:
            raise CohortNotFound(f"cohort {name!r} does not exist")
        return cohort

    def count(self, tenant: str) -> int:
        """Returns how many cohorts a tenant has."""
        return self._count(Cohort.tenant == tenant)

    def by_number(self, number: int, *, lock: bool = False) -> Cohort:
        """Returns an existing cohort. lock: until the transaction ends."""
        if lock:
            return self._session.scalars(locked(select(Cohort).where(Cohort.number == number))).one()
        return self._session.get_one(Cohort, number)

    def of_round_locked(self, round_id: str) -> Cohort:
        """Returns the cohort of an existing round, and locks it."""
        number = select(CohortRound.cohort_number).where(CohortRound.id == round_id).scalar_subquery()
        return self._session.scalars(locked(select(Cohort).where(Cohort.number == number))).one()

    def lock_of_lease(self, lease_id: str) -> None:
        """Locks the cohort of a leased job, if the job belongs to a round."""
        statement = (
            select(Cohort)
            .join(CohortRound, CohortRound.cohort_number == Cohort.number)
            .join(MemberUpdate, MemberUpdate.round_number == CohortRound.number)
            .join(JobLease, JobLease.job_number == MemberUpdate.job_number)
            .where(JobLease.id == lease_id)
        )
        self._session.scalars(locked(statement, of=Cohort)).all()

    def page(self, tenant: str, request: PageRequest) -> PageRows[Cohort]:
        """Returns one page of a tenant's cohorts, newest first."""
        return page_of(self._session, Cohort, request, Cohort.tenant == tenant)

    def to_open(self) -> Sequence[int]:
        """Returns the numbers of cohorts whose next round opens automatically and which have no round in progress."""
        statement = select(Cohort.number).where(Cohort.opens, not_(Cohort.busy)).order_by(Cohort.number)
        return self._session.scalars(statement).all()

    def member(self, cohort: Cohort, user: str) -> CohortMember | None:
        """Returns a current or former member of the cohort, or None."""
        return self._one(CohortMember, CohortMember.cohort_number == cohort.number, CohortMember.user == user)

    def member_of_device(self, cohort: Cohort, device_id: str) -> CohortMember | None:
        """Returns the current member for whom a device trains, or None."""
        return self._one(CohortMember, _current(cohort.number), CohortMember.device_id == device_id)

    def members_page(self, cohort: Cohort, request: PageRequest) -> PageRows[CohortMember]:
        """Returns one page of the cohort's current members, newest first."""
        return page_of(self._session, CohortMember, request, _current(cohort.number))

    def count_members(self, cohorts: Sequence[Cohort]) -> dict[int, int]:
        """Returns the number of current members of each cohort, by cohort number."""
        statement = (
            select(CohortMember.cohort_number, func.count())
            .where(
                CohortMember.cohort_number.in_([cohort.number for cohort in cohorts]), CohortMember.left_at.is_(None)
            )
            .group_by(CohortMember.cohort_number)
        )
        return {row[0]: row[1] for row in self._session.execute(statement)}

    def count_updates(self, members: Sequence[CohortMember]) -> dict[int, int]:
        """Returns the number of accepted updates of each member, by member number."""
        statement = (
            select(MemberUpdate.member_number, func.count())
            .where(
                MemberUpdate.member_number.in_([member.number for member in members]),
                MemberUpdate.state == UpdateState.COUNTED,
            )
            .group_by(MemberUpdate.member_number)
        )
        return {row[0]: row[1] for row in self._session.execute(statement)}

    def unlisted(self, cohort_round: CohortRound) -> Sequence[CohortMember]:
        """Returns the members of the cohort without a part in a round, in the order in which they joined."""
        part = exists().where(
            MemberUpdate.round_number == cohort_round.number, MemberUpdate.member_number == CohortMember.number
        )
        return self._all(CohortMember, _current(cohort_round.cohort_number), not_(part))


def _current(cohort_number: int) -> ColumnElement[bool]:
    """Returns the condition for the current members of a cohort."""
    return (CohortMember.cohort_number == cohort_number) & CohortMember.left_at.is_(None)


def cohort_with_calibration(session: Session, sha256: str) -> str | None:
    """Returns the description of a cohort that takes A from this calibration, or None."""
    cohort = session.scalar(select(Cohort.name).where(names_calibration(Cohort.recipe, sha256)).limit(1))
    return None if cohort is None else f"cohort {cohort!r}"


def adapters_of_member(device_id: str) -> Select[int]:
    """Returns the query for the adapter numbers of the cohorts for whose members a device trains."""
    return (
        select(Adapter.number)
        .join(Cohort, and_(Cohort.tenant == Adapter.tenant, Cohort.name == Adapter.name))
        .join(CohortMember, CohortMember.cohort_number == Cohort.number)
        .join(DeviceUser, (DeviceUser.user == CohortMember.user) & (DeviceUser.device_id == CohortMember.device_id))
        .where(CohortMember.device_id == device_id, CohortMember.left_at.is_(None))
    )


class CohortAdapters(JobSubscriber):
    """Keeps users' jobs away from the adapters of cohorts, in one transaction."""

    def __init__(self, session: Session) -> None:
        self._cohorts = CohortRepository(session)

    def check_adapter(self, tenant: str, request: JobRequest) -> None:
        """Raises Conflict if the adapter belongs to a cohort: only rounds of the cohort train it."""
        if self._cohorts.get(tenant, request.adapter) is not None:
            raise Conflict(
                f"adapter {request.adapter!r} belongs to a cohort; choose another name, and set the job's start to "
                "this adapter to continue training from it"
            )


def record(session: Session, cohort: Cohort, actor: Actor, action: AdapterAction, reason: str) -> None:
    """Adds a line to the audit trail and to the log. After the adapter is purged, only the log records events."""
    adapter = AdapterRepository(session).get(cohort.tenant, cohort.name)
    if adapter is not None:
        AuditTrail(session).add(adapter, actor, AuditEntry(action, reason=reason))
    _log.info(f"cohort-{action}", tenant=cohort.tenant, cohort=cohort.name, reason=reason)
