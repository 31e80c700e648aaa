"""All SQL about trajectories and what was made of them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.cohorts.models import Cohort
from server.history.models import MaterialisedStep, StoredTrajectory
from shared.cohort import AlgorithmSettings


class HistoryRepository:
    """Trajectories in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: StoredTrajectory | MaterialisedStep) -> None:
        """Stores a new row."""
        self._session.add(row)
        self._session.flush()

    def of_version(self, version: StoredVersion) -> StoredTrajectory | None:
        """The trajectory that came with a version."""
        return self._session.get(StoredTrajectory, version.number)

    def step(self, version: StoredVersion, step: int) -> MaterialisedStep | None:
        """What B was after a step, if it was ever made."""
        return self._session.get(MaterialisedStep, (version.number, step))

    def of_job(self, job_id: str) -> StoredVersion:
        """The version that a job has made."""
        return self._session.scalars(select(StoredVersion).where(StoredVersion.job_id == job_id)).one()

    def algorithm_of(self, tenant: str, cohort: str) -> AlgorithmSettings | None:
        """The algorithm of a cohort's rounds."""
        settings = self._session.scalar(select(Cohort.settings).where(Cohort.tenant == tenant, Cohort.name == cohort))
        return None if settings is None else settings.algorithm

    def with_b(self, tenant: str, sha256: str) -> StoredVersion | None:
        """A version of the tenant whose LoRA-B file has that hash."""
        statement = (
            select(StoredVersion)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .where(Adapter.tenant == tenant, StoredVersion.sha256 == sha256)
        )
        return self._session.scalars(statement.order_by(StoredVersion.number).limit(1)).first()
