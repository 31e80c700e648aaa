"""All SQL about which device may have which adapter."""

from __future__ import annotations

from sqlalchemy import CompoundSelect, and_, delete, select, union
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.assignments.models import Assignment
from server.cohorts.models import Cohort, CohortMember
from server.db.paging import PageRequest, PageRows, page_of
from server.programs.models import ProgramBlob


def _seen_by(device_id: str) -> CompoundSelect[int]:
    """Numbers of the adapters that a device was assigned, has trained a version of, or is in the cohort of."""
    assigned = select(Assignment.adapter_number).where(Assignment.device_id == device_id)
    trained = select(StoredVersion.adapter_number).where(StoredVersion.device_id == device_id)
    shared = (
        select(Adapter.number)
        .join(Cohort, and_(Cohort.tenant == Adapter.tenant, Cohort.name == Adapter.name))
        .join(CohortMember, CohortMember.cohort_number == Cohort.number)
        .where(CohortMember.device_id == device_id, CohortMember.left_at.is_(None))
    )
    return union(assigned, trained, shared)


class AssignmentRepository:
    """Assignments in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, assignment: Assignment) -> None:
        """Stores a new one."""
        self._session.add(assignment)
        self._session.flush()

    def get(self, adapter: Adapter, device_id: str) -> Assignment | None:
        """The assignment of an adapter to a device."""
        return self._session.scalar(
            select(Assignment).where(Assignment.adapter_number == adapter.number, Assignment.device_id == device_id)
        )

    def remove(self, adapter: Adapter, device_id: str) -> None:
        """Takes an assignment back, if there is one."""
        chosen = Assignment.adapter_number == adapter.number, Assignment.device_id == device_id
        self._session.execute(delete(Assignment).where(*chosen))

    def page(self, adapter: Adapter, request: PageRequest) -> PageRows[Assignment]:
        """Some of an adapter's assignments, newest first."""
        statement = select(Assignment).where(Assignment.adapter_number == adapter.number)
        return page_of(self._session, statement, Assignment, request)

    def sees(self, device_id: str, adapter: Adapter) -> bool:
        """Whether a device may have an adapter's published versions."""
        statement = select(Adapter.number).where(
            Adapter.number == adapter.number, Adapter.number.in_(_seen_by(device_id))
        )
        return self._session.scalar(statement) is not None

    def file(self, device_id: str, sha256: str) -> ProgramBlob | None:
        """A file of the program of a version that a device may have."""
        statement = (
            select(ProgramBlob)
            .join(StoredVersion, StoredVersion.recipe_id == ProgramBlob.recipe_id)
            .where(ProgramBlob.sha256 == sha256, StoredVersion.adapter_number.in_(_seen_by(device_id)))
        )
        return self._session.scalar(statement.limit(1))
