"""All SQL about adapters, their versions, tags and made files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, func, or_, select
from sqlalchemy.orm import Session

from server.adapters.models import Adapter, AdapterTag, StoredPeftFile, StoredVersion, TenantRule
from server.db.locking import locked
from server.db.paging import PageRequest, PageRows, page_of
from server.jobs.models import Job
from shared.registry import VersionState

_LIVE = StoredVersion.deleted_at.is_(None)


def _is(tenant: str, name: str) -> ColumnElement[bool]:
    return and_(Adapter.tenant == tenant, Adapter.name == name)


def _unsigned(key_id: str) -> ColumnElement[bool]:
    # Said in three parts, each of which an index answers.
    return or_(StoredVersion.key_id.is_(None), StoredVersion.key_id < key_id, StoredVersion.key_id > key_id)


class AdapterRepository:
    """Adapters in one session."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, row: Adapter | StoredVersion | StoredPeftFile | AdapterTag) -> None:
        """Stores a new row."""
        self._session.add(row)
        self._session.flush()

    def get(self, tenant: str, name: str) -> Adapter | None:
        """An adapter of a tenant, also a deleted one."""
        return self._session.scalar(select(Adapter).where(_is(tenant, name)))

    def get_locked(self, tenant: str, name: str) -> Adapter | None:
        """The same; nobody else changes it, its versions or its tags until the transaction ends."""
        return self._session.scalar(locked(select(Adapter).where(_is(tenant, name))))

    def page(self, tenant: str, request: PageRequest, *, deleted: bool = False) -> PageRows[Adapter]:
        """Some of a tenant's adapters, newest first: those that are there, or those that were deleted."""
        gone = Adapter.deleted_at.is_not(None) if deleted else Adapter.deleted_at.is_(None)
        return page_of(self._session, select(Adapter).where(Adapter.tenant == tenant, gone), Adapter, request)

    def version(self, adapter: Adapter, version: int) -> StoredVersion | None:
        """One version of an adapter, also a deleted one."""
        statement = select(StoredVersion).where(
            StoredVersion.adapter_number == adapter.number, StoredVersion.version == version
        )
        return self._session.scalar(statement)

    def by_revision(self, adapter: Adapter, prefix: str) -> Sequence[StoredVersion]:
        """At most two versions whose revision begins with `prefix`, hexadecimal digits; also deleted ones."""
        statement = select(StoredVersion).where(
            StoredVersion.adapter_number == adapter.number,
            StoredVersion.revision >= prefix,
            StoredVersion.revision < prefix + "g",
        )
        return self._session.scalars(statement.limit(2)).all()

    def parent(self, tenant: str, name: str, revision: str) -> StoredVersion | None:
        """The version of a whole revision, also a deleted one; None once it was removed."""
        statement = select(StoredVersion).join(Adapter, Adapter.number == StoredVersion.adapter_number)
        return self._session.scalar(statement.where(_is(tenant, name), StoredVersion.revision == revision))

    def by_tag(self, adapter: Adapter, name: str) -> StoredVersion | None:
        """The version that has a tag."""
        statement = (
            select(StoredVersion)
            .join(AdapterTag, AdapterTag.version_number == StoredVersion.number)
            .where(AdapterTag.adapter_number == adapter.number, AdapterTag.name == name)
        )
        return self._session.scalar(statement)

    def versions(self, adapter: Adapter, request: PageRequest, state: VersionState | None) -> PageRows[StoredVersion]:
        """Some of an adapter's versions, newest first; of one state, if it is given."""
        statement = select(StoredVersion).where(StoredVersion.adapter_number == adapter.number)
        if state is VersionState.DELETED:
            statement = statement.where(StoredVersion.deleted_at.is_not(None))
        elif state is not None:
            statement = statement.where(_LIVE, StoredVersion.kept_state == state)
        return page_of(self._session, statement, StoredVersion, request)

    def latest_approved(self, adapter: Adapter) -> int | None:
        """The highest number of an approved version."""
        return self._session.scalar(
            select(func.max(StoredVersion.version)).where(
                StoredVersion.adapter_number == adapter.number,
                StoredVersion.kept_state == VersionState.APPROVED,
                _LIVE,
            )
        )

    def latest(self, adapters: Iterable[Adapter]) -> dict[int, StoredVersion]:
        """The latest version of each adapter that was not deleted, by the adapter's number."""
        numbers = [adapter.number for adapter in adapters]
        newest = (
            select(func.max(StoredVersion.number))
            .where(StoredVersion.adapter_number.in_(numbers), _LIVE)
            .group_by(StoredVersion.adapter_number)
        )
        found = self._session.scalars(select(StoredVersion).where(StoredVersion.number.in_(newest)))
        return {version.adapter_number: version for version in found}

    def of_job(self, job_id: str) -> tuple[Adapter, StoredVersion] | None:
        """The version that a succeeded job made, with its adapter; None once it was removed."""
        statement = (
            select(Adapter, StoredVersion)
            .join(StoredVersion, StoredVersion.adapter_number == Adapter.number)
            .where(StoredVersion.job_id == job_id)
        )
        found = self._session.execute(statement).one_or_none()
        return None if found is None else (found[0], found[1])

    def tags(self, adapters: Iterable[Adapter]) -> dict[int, dict[str, int]]:
        """Versions by the tags on them, by the adapter's number; without those of deleted versions."""
        statement = (
            select(AdapterTag.adapter_number, AdapterTag.name, StoredVersion.version)
            .join(StoredVersion, StoredVersion.number == AdapterTag.version_number)
            .where(AdapterTag.adapter_number.in_([adapter.number for adapter in adapters]), _LIVE)
            .order_by(AdapterTag.name)
        )
        found: dict[int, dict[str, int]] = {}
        for number, name, version in self._session.execute(statement):
            found.setdefault(number, {})[name] = version
        return found

    def tag(self, adapter: Adapter, name: str) -> AdapterTag | None:
        """A tag."""
        return self._session.scalar(
            select(AdapterTag).where(AdapterTag.adapter_number == adapter.number, AdapterTag.name == name)
        )

    def count_tags(self, adapter: Adapter) -> int:
        """How many tags an adapter has."""
        statement = select(func.count()).where(AdapterTag.adapter_number == adapter.number)
        return self._session.scalar(statement) or 0

    def untag(self, tag: AdapterTag) -> None:
        """Takes a tag away."""
        self._session.delete(tag)
        self._session.flush()

    def tenant_rule(self, tenant: str) -> TenantRule | None:
        """A tenant's rule, if it has one."""
        return self._session.get(TenantRule, tenant)

    def keep_tenant_rule(self, rule: TenantRule) -> None:
        """Sets a tenant's rule."""
        self._session.merge(rule)

    def forget_tenant_rule(self, tenant: str) -> None:
        """Takes a tenant's rule away."""
        self._session.execute(delete(TenantRule).where(TenantRule.tenant == tenant))

    def any_to_sign(self, key_id: str) -> bool:
        """Whether there is a version that this key has not signed."""
        return self._session.scalar(select(StoredVersion.number).where(_unsigned(key_id)).limit(1)) is not None

    def to_sign(self, key_id: str, limit: int) -> Sequence[tuple[StoredVersion, Adapter, Job | None]]:
        """Some versions that this key has not signed, their adapters locked; no job made a cohort's."""
        statement = (
            select(StoredVersion, Adapter, Job)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .outerjoin(Job, Job.id == StoredVersion.job_id)
            .where(_unsigned(key_id))
            .order_by(Adapter.number, StoredVersion.number)
            .limit(limit)
        )
        found = self._session.execute(locked(statement, of=Adapter)).all()
        return [(version, adapter, job) for version, adapter, job in found]

    def made_files(self, version: StoredVersion) -> Sequence[StoredPeftFile]:
        """The files that were made of a version, by name."""
        statement = select(StoredPeftFile).where(StoredPeftFile.version_number == version.number)
        return self._session.scalars(statement.order_by(StoredPeftFile.path)).all()

    def forget_files(self, versions: Iterable[int], path: str | None = None) -> None:
        """What was made of these versions, by their rows' numbers, is made anew when it is asked for; or one file."""
        statement = delete(StoredPeftFile).where(StoredPeftFile.version_number.in_(list(versions)))
        self._session.execute(statement if path is None else statement.where(StoredPeftFile.path == path))

    def overdue(
        self, before: datetime, limit: int
    ) -> tuple[Sequence[Adapter], Sequence[tuple[Adapter, StoredVersion]]]:
        """Some adapters that were deleted before then, and some versions of others."""
        adapters = self._session.scalars(
            locked(select(Adapter).where(Adapter.deleted_at < before).order_by(Adapter.number).limit(limit), skip=True)
        ).all()
        statement = (
            select(Adapter, StoredVersion)
            .join(StoredVersion, StoredVersion.adapter_number == Adapter.number)
            .where(StoredVersion.deleted_at < before, Adapter.number.not_in([row.number for row in adapters]))
            .order_by(Adapter.number)
            .limit(limit)
        )
        found = self._session.execute(locked(statement, of=Adapter, skip=True)).all()
        return adapters, [(adapter, version) for adapter, version in found]

    def numbers_of(self, adapter: Adapter) -> Sequence[int]:
        """The rows' numbers of all versions of an adapter."""
        statement = select(StoredVersion.number).where(StoredVersion.adapter_number == adapter.number)
        return self._session.scalars(statement).all()

    def remove_versions(self, numbers: Sequence[int]) -> None:
        """Removes versions for good, with their tags and made files."""
        self.forget_files(numbers)
        self._session.execute(delete(AdapterTag).where(AdapterTag.version_number.in_(numbers)))
        self._session.execute(delete(StoredVersion).where(StoredVersion.number.in_(numbers)))

    def remove(self, adapter: Adapter) -> None:
        """Removes an adapter that has no version any more."""
        self._session.delete(adapter)
        self._session.flush()
