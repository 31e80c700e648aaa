"""All SQL about trajectories and the steps that were rebuilt from them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.registry.models import Adapter, StoredVersion
from server.registry.trajectories.models import MaterialisedStep, StoredTrajectory


class TrajectoryRepository:
    """Trajectories in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: StoredTrajectory | MaterialisedStep) -> None:
        """Stores a new row."""
        self._session.add(row)
        self._session.flush()

    def of_version(self, version: StoredVersion) -> StoredTrajectory | None:
        """Returns the trajectory of a version."""
        return self._session.get(StoredTrajectory, version.number)

    def step(self, version: StoredVersion, step: int) -> MaterialisedStep | None:
        """Returns the file of B after a step, if it was ever rebuilt."""
        return self._session.get(MaterialisedStep, (version.number, step))

    def of_job(self, job_id: str) -> StoredVersion:
        """Returns the version that a job made."""
        return self._session.scalars(select(StoredVersion).where(StoredVersion.job_id == job_id)).one()

    def with_b(self, tenant: str, sha256: str) -> StoredVersion | None:
        """Returns a version of the tenant whose LoRA-B file has that hash."""
        statement = (
            select(StoredVersion)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .where(Adapter.tenant == tenant, StoredVersion.sha256 == sha256)
        )
        return self._session.scalars(statement.order_by(StoredVersion.number).limit(1)).first()
