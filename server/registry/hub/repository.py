"""All SQL about adapters as repositories of the Hub API."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from server.database.paging import PageRequest, PageRows, page_of
from server.registry.models import Adapter, AdapterTag, StoredVersion


class HubRepository:
    """Repositories in one session, without deleted adapters and versions."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def page(self, tenant: str, search: str, request: PageRequest) -> PageRows[Adapter]:
        """Returns a page of a tenant's adapters whose name contains `search`, newest first."""
        statement = select(Adapter).where(Adapter.tenant == tenant, Adapter.deleted_at.is_(None))
        if search:
            statement = statement.where(Adapter.name.contains(search.lower(), autoescape=True))
        return page_of(self._session, statement, Adapter, request)

    def mains(self, adapters: Sequence[Adapter]) -> dict[int, StoredVersion]:
        """Returns the versions that are `main`, by their adapters' numbers."""
        statement = (
            select(StoredVersion)
            .join(
                Adapter,
                and_(Adapter.number == StoredVersion.adapter_number, Adapter.main_version == StoredVersion.version),
            )
            .where(Adapter.number.in_([adapter.number for adapter in adapters]))
        )
        return {version.adapter_number: version for version in self._session.scalars(statement)}

    def names(self, adapter: Adapter) -> list[tuple[str, str]]:
        """Returns (name, revision) of every tag and of every version number."""
        statement = (
            select(AdapterTag.name, StoredVersion.revision)
            .join(StoredVersion, StoredVersion.number == AdapterTag.version_number)
            .where(AdapterTag.adapter_number == adapter.number, StoredVersion.deleted_at.is_(None))
            .order_by(AdapterTag.name)
        )
        tagged = [(name, revision) for name, revision in self._session.execute(statement) if revision is not None]
        versions = (
            select(StoredVersion.version, StoredVersion.revision)
            .where(StoredVersion.adapter_number == adapter.number, StoredVersion.deleted_at.is_(None))
            .order_by(StoredVersion.version)
        )
        numbered = self._session.execute(versions)
        return tagged + [(f"v{number}", revision) for number, revision in numbered if revision is not None]

    def history(self, version: StoredVersion, request: PageRequest) -> PageRows[StoredVersion]:
        """Returns a page of the versions up to this one, newest first."""
        statement = select(StoredVersion).where(
            StoredVersion.adapter_number == version.adapter_number,
            StoredVersion.version <= version.version,
            StoredVersion.deleted_at.is_(None),
            StoredVersion.revision.is_not(None),
        )
        return page_of(self._session, statement, StoredVersion, request)
