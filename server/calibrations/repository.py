"""All SQL about calibrations."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, Text, select, type_coerce
from sqlalchemy.orm import InstrumentedAttribute, Session

from server.adapters.models import Adapter, StoredVersion
from server.bases.models import BaseModelEntry
from server.calibrations.models import StoredCalibration
from server.cohorts.models import Cohort
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.jobs.models import Job
from server.jobs.repository import OPEN
from shared.protocol import CalibrationView
from shared.recipe import Recipe


class CalibrationRepository:
    """Calibrations in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, calibration: StoredCalibration) -> None:
        """Stores a new calibration."""
        self._session.add(calibration)
        self._session.flush()

    def remove(self, calibration: StoredCalibration) -> None:
        """Forgets a calibration; its file goes with the collector's next pass."""
        self._session.delete(calibration)

    def named(self, sha256: str) -> StoredCalibration | None:
        """The calibration of that file."""
        return self._session.scalar(select(StoredCalibration).where(StoredCalibration.sha256 == sha256))

    def named_shared(self, sha256: str) -> StoredCalibration | None:
        """The same, and nobody removes it until the transaction, which makes a recipe that names it, ends."""
        statement = select(StoredCalibration).where(StoredCalibration.sha256 == sha256)
        return self._session.scalar(statement.with_for_update(read=True))

    def beginning_locked(self, beginning: str) -> Sequence[StoredCalibration]:
        """Calibrations whose sha256 begins so; nobody makes a recipe that names one until the transaction ends."""
        sha256 = StoredCalibration.sha256
        return self._session.scalars(locked(select(StoredCalibration).where(sha256.startswith(beginning)))).all()

    def bases(self, sha256: str) -> Sequence[BaseModelEntry]:
        """The base models of those files, whatever their names."""
        statement = select(BaseModelEntry).where(BaseModelEntry.sha256 == sha256).order_by(BaseModelEntry.number)
        return self._session.scalars(statement).all()

    def base(self, calibration: StoredCalibration) -> BaseModelEntry:
        """A calibration's base model."""
        return self._session.get_one(BaseModelEntry, calibration.base_number)

    def page(self, request: PageRequest) -> PageRows[StoredCalibration]:
        """Some of all calibrations, newest first."""
        return page_of(self._session, select(StoredCalibration), StoredCalibration, request)

    def views(self, calibrations: Sequence[StoredCalibration]) -> list[CalibrationView]:
        """As the API shows them."""
        return [calibration.view(self.base(calibration).name) for calibration in calibrations]

    def user(self, sha256: str) -> str | None:
        """One that still needs A from that calibration, in words: an adapter, a cohort or an unfinished job."""
        adapter = self._session.execute(
            select(Adapter.name, StoredVersion.version)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .where(_names(StoredVersion.recipe, sha256))
            .limit(1)
        ).first()
        if adapter is not None:
            return f"version {adapter.version} of adapter {adapter.name!r}"
        cohort = self._session.scalar(select(Cohort.name).where(_names(Cohort.recipe, sha256)).limit(1))
        if cohort is not None:
            return f"cohort {cohort!r}"
        statement = select(Job.id).where(Job.state.in_(OPEN), _names(Job.recipe, sha256))
        job = self._session.scalar(statement.limit(1))
        return None if job is None else f"job {job}"


def _names(recipe: InstrumentedAttribute[Recipe], sha256: str) -> ColumnElement[bool]:
    """Whether a recipe's JSON names that calibration; of a sha256 no other field can hold it."""
    return type_coerce(recipe, Text).contains(f'"calibration":"{sha256}"')
