"""All SQL about adapters, their versions and PEFT files."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredPeftFile, StoredVersion
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of


class AdapterRepository:
    """Adapters in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: Adapter | StoredVersion | StoredPeftFile) -> None:
        """Stores a new row."""
        self._session.add(row)
        self._session.flush()

    def get(self, tenant: str, name: str) -> Adapter | None:
        """An adapter of a tenant."""
        return self._session.scalar(select(Adapter).where(Adapter.tenant == tenant, Adapter.name == name))

    def get_locked(self, tenant: str, name: str) -> Adapter | None:
        """An adapter of a tenant that nobody else gives a version until the transaction ends."""
        return self._session.scalar(locked(select(Adapter).where(Adapter.tenant == tenant, Adapter.name == name)))

    def page(self, tenant: str, request: PageRequest) -> PageRows[Adapter]:
        """Some of a tenant's adapters, newest first."""
        return page_of(self._session, select(Adapter).where(Adapter.tenant == tenant), Adapter, request)

    def version(self, adapter: Adapter, version: int) -> StoredVersion | None:
        """One version of an adapter."""
        statement = select(StoredVersion).where(
            StoredVersion.adapter_number == adapter.number, StoredVersion.version == version
        )
        return self._session.scalar(statement)

    def of_job(self, job_id: str) -> tuple[Adapter, StoredVersion]:
        """The version that a succeeded job made, with its adapter."""
        statement = (
            select(Adapter, StoredVersion)
            .join(StoredVersion, StoredVersion.adapter_number == Adapter.number)
            .where(StoredVersion.job_id == job_id)
        )
        adapter, version = self._session.execute(statement).one()
        return adapter, version

    def peft_files(self, version: StoredVersion) -> Sequence[StoredPeftFile]:
        """The files of a version's PEFT directory by name; empty until they were made."""
        statement = select(StoredPeftFile).where(StoredPeftFile.version_number == version.number)
        return self._session.scalars(statement.order_by(StoredPeftFile.path)).all()
