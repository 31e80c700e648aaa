"""All SQL about adapters, their versions and generated files, and what names and revisions stand for.

A revision is `main`, a number (`v7` or `7`), or a version's revision: 40 hexadecimal digits, or a prefix of at
least 7 digits that no other version of the adapter shares. Deleted versions and those of other tenants are not found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime

from sqlalchemy import ColumnElement, and_, delete, func, or_, select, text
from sqlalchemy.orm import Session

from server.catalog.calibrations.service import names_calibration
from server.database.columns import MAX_INTEGER
from server.database.database import Database, Repository, locked
from server.database.paging import PageRequest, PageRows, page_of
from server.identity.quotas import QuotaService
from server.registry.models import Adapter, StoredPeftFile, StoredVersion, TenantRule
from shared.errors import AdapterNotFound, RevisionNotFound
from shared.job import NAME
from shared.registry import MAIN, MIN_PREFIX, REVISION_DIGITS, VersionState

_LIVE = StoredVersion.deleted_at.is_(None)
# The condition of a partial index, whose constants cannot be parameters.
_IS_HELD = text("adapter_versions.kept_state = 'held' AND adapter_versions.deleted_at IS NULL")


def _is(tenant: str, name: str) -> ColumnElement[bool]:
    return and_(Adapter.tenant == tenant, Adapter.name == name)


class AdapterRepository(Repository):
    """Adapters in one session."""

    def get(self, tenant: str, name: str, *, lock: bool = False) -> Adapter | None:
        """Returns an adapter of a tenant, which may be deleted. lock: with its versions, until the transaction ends."""
        return self._one(Adapter, _is(tenant, name), lock=lock)

    def page(self, tenant: str, request: PageRequest, *, deleted: bool = False) -> PageRows[Adapter]:
        """Returns a page of a tenant's adapters, newest first: either existing or deleted ones."""
        condition = Adapter.deleted_at.is_not(None) if deleted else Adapter.deleted_at.is_(None)
        return page_of(self._session, Adapter, request, Adapter.tenant == tenant, condition)

    def version(self, adapter: Adapter, version: int) -> StoredVersion | None:
        """Returns a version of an adapter, which may be deleted."""
        of_adapter = StoredVersion.adapter_number == adapter.number
        return self._one(StoredVersion, of_adapter, StoredVersion.version == version)

    def current(self, adapter: Adapter) -> StoredVersion | None:
        """Returns `main` of an adapter, or without one its latest version that is not deleted; None: it has none."""
        if adapter.main_version is not None:
            return self.version(adapter, adapter.main_version)
        return self.latest([adapter]).get(adapter.number)

    def by_revision(self, adapter: Adapter, prefix: str) -> Sequence[StoredVersion]:
        """Returns at most two versions whose revision begins with `prefix`, hexadecimal digits; they may be deleted."""
        statement = select(StoredVersion).where(
            StoredVersion.adapter_number == adapter.number,
            StoredVersion.revision >= prefix,
            StoredVersion.revision < prefix + "g",
        )
        return self._session.scalars(statement.limit(2)).all()

    def parent(self, tenant: str, name: str, revision: str) -> StoredVersion | None:
        """Returns the version of a full revision, which may be deleted; None once it was purged."""
        statement = select(StoredVersion).join(Adapter, Adapter.number == StoredVersion.adapter_number)
        return self._session.scalar(statement.where(_is(tenant, name), StoredVersion.revision == revision))

    def with_b(self, tenant: str, sha256: str) -> StoredVersion | None:
        """Returns a version of the tenant whose LoRA-B file has that hash."""
        statement = select(StoredVersion).join(Adapter, Adapter.number == StoredVersion.adapter_number)
        statement = statement.where(Adapter.tenant == tenant, StoredVersion.sha256 == sha256)
        return self._session.scalars(statement.order_by(StoredVersion.number).limit(1)).first()

    def versions(self, adapter: Adapter, request: PageRequest, state: VersionState | None) -> PageRows[StoredVersion]:
        """Returns a page of an adapter's versions, newest first, optionally of one state."""
        conditions = [StoredVersion.adapter_number == adapter.number]
        if state is VersionState.DELETED:
            conditions.append(StoredVersion.deleted_at.is_not(None))
        elif state is not None:
            conditions += _LIVE, StoredVersion.kept_state == state
        return page_of(self._session, StoredVersion, request, *conditions)

    def held_versions(self, tenant: str, limit: int) -> Sequence[tuple[Adapter, StoredVersion]]:
        """Returns versions of a tenant that wait for approval, newest first."""
        statement = (
            select(Adapter, StoredVersion)
            .join(StoredVersion, StoredVersion.adapter_number == Adapter.number)
            .where(Adapter.tenant == tenant, Adapter.deleted_at.is_(None))
            .where(_IS_HELD)
            .order_by(StoredVersion.number.desc())
            .limit(limit)
        )
        return [(adapter, version) for adapter, version in self._session.execute(statement)]

    def latest_approved(self, adapter: Adapter) -> int | None:
        """Returns the highest number of an approved version."""
        return self._session.scalar(
            select(func.max(StoredVersion.version)).where(
                StoredVersion.adapter_number == adapter.number,
                StoredVersion.kept_state == VersionState.APPROVED,
                _LIVE,
            )
        )

    def latest(self, adapters: Iterable[Adapter]) -> dict[int, StoredVersion]:
        """Returns the latest version of each adapter that is not deleted, by the adapter's number."""
        numbers = [adapter.number for adapter in adapters]
        newest = (
            select(func.max(StoredVersion.number))
            .where(StoredVersion.adapter_number.in_(numbers), _LIVE)
            .group_by(StoredVersion.adapter_number)
        )
        versions = self._session.scalars(select(StoredVersion).where(StoredVersion.number.in_(newest)))
        return {version.adapter_number: version for version in versions}

    def of_job(self, job_id: str) -> tuple[Adapter, StoredVersion] | None:
        """Returns the version that a succeeded job made, with its adapter; None once it was purged."""
        statement = (
            select(Adapter, StoredVersion)
            .join(StoredVersion, StoredVersion.adapter_number == Adapter.number)
            .where(StoredVersion.job_id == job_id)
        )
        row = self._session.execute(statement).one_or_none()
        return None if row is None else (row[0], row[1])

    def tenant_rule(self, tenant: str) -> TenantRule | None:
        """Returns a tenant's rule, if it has one."""
        return self._session.get(TenantRule, tenant)

    def set_tenant_rule(self, rule: TenantRule) -> None:
        """Sets a tenant's rule."""
        self._session.merge(rule)

    def delete_tenant_rule(self, tenant: str) -> None:
        """Removes a tenant's rule."""
        self._session.execute(delete(TenantRule).where(TenantRule.tenant == tenant))

    def to_sign(self, key_id: str, limit: int, *, lock: bool = False) -> Sequence[StoredVersion]:
        """Returns versions that this key has not signed. lock: locks their adapters."""
        statement = (
            select(StoredVersion)
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            # Two conditions, each of which an index answers.
            .where(or_(StoredVersion.key_id < key_id, StoredVersion.key_id > key_id))
            .order_by(Adapter.number, StoredVersion.number)
            .limit(limit)
        )
        return self._session.scalars(locked(statement, of=Adapter) if lock else statement).all()

    def generated_files(self, version: StoredVersion) -> Sequence[StoredPeftFile]:
        """Returns the generated files of a version, by name."""
        statement = select(StoredPeftFile).where(StoredPeftFile.version_number == version.number)
        return self._session.scalars(statement.order_by(StoredPeftFile.path)).all()

    def delete_generated_files(self, versions: Iterable[int], path: str | None = None) -> None:
        """Deletes the rows of all generated files of versions, or of one; files are generated again on request."""
        statement = delete(StoredPeftFile).where(StoredPeftFile.version_number.in_(list(versions)))
        self._session.execute(statement if path is None else statement.where(StoredPeftFile.path == path))

    def overdue(
        self, before: datetime, limit: int
    ) -> tuple[Sequence[Adapter], Sequence[tuple[Adapter, StoredVersion]]]:
        """Returns adapters that were deleted before a time, and deleted versions of other adapters."""
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
        rows = self._session.execute(locked(statement, of=Adapter, skip=True)).all()
        return adapters, [(adapter, version) for adapter, version in rows]

    def numbers_of(self, adapter: Adapter) -> Sequence[int]:
        """Returns the row numbers of all versions of an adapter."""
        statement = select(StoredVersion.number).where(StoredVersion.adapter_number == adapter.number)
        return self._session.scalars(statement).all()

    def remove_versions(self, numbers: Sequence[int]) -> None:
        """Purges versions with their generated files."""
        stored = (
            select(Adapter.tenant, func.sum(StoredVersion.stored_bytes))
            .join(Adapter, Adapter.number == StoredVersion.adapter_number)
            .where(StoredVersion.number.in_(numbers))
            .group_by(Adapter.tenant)
            .order_by(Adapter.tenant)
        )
        freed = self._session.execute(stored).all()
        self.delete_generated_files(numbers)
        self._session.execute(delete(StoredVersion).where(StoredVersion.number.in_(numbers)))
        for tenant, size in freed:
            QuotaService(self._session).store(tenant, -int(size))

    def remove(self, adapter: Adapter) -> None:
        """Purges an adapter whose versions were purged."""
        self._session.delete(adapter)
        self._session.flush()


def version_with_calibration(session: Session, sha256: str) -> str | None:
    """Returns the name of a version whose A comes from the calibration of that sha256."""
    adapter = session.execute(
        select(Adapter.name, StoredVersion.version)
        .join(Adapter, Adapter.number == StoredVersion.adapter_number)
        .where(names_calibration(StoredVersion.recipe, sha256))
        .limit(1)
    ).first()
    return None if adapter is None else f"version {adapter.version} of adapter {adapter.name!r}"


_NUMBER = re.compile(r"v?([1-9][0-9]{0,9})")
_DIGITS = re.compile(rf"[0-9a-f]{{{MIN_PREFIX},{REVISION_DIGITS}}}")


def find_adapter(session: Session, tenant: str, name: str, *, lock: bool = False, deleted: bool = False) -> Adapter:
    """Returns a tenant's adapter. Raises AdapterNotFound.

    lock: locks it until the transaction ends. deleted: also finds deleted adapters.
    """
    adapter = AdapterRepository(session).get(tenant, name, lock=lock) if re.fullmatch(NAME, name) else None
    if adapter is None or (adapter.deleted_at is not None and not deleted):
        raise AdapterNotFound(f"there is no adapter {name!r}")
    return adapter


def find_version(session: Session, adapter: Adapter, revision: str, *, deleted: bool = False) -> StoredVersion:
    """Returns the version of a revision. deleted: also finds deleted versions. Raises RevisionNotFound."""
    adapters = AdapterRepository(session)
    if revision == MAIN:
        if adapter.main_version is None:
            raise RevisionNotFound(f"adapter {adapter.name!r} has no `main`: none of its versions is approved")
        revision = f"v{adapter.main_version}"
    version = _named(adapters, adapter, revision)
    if version is None or (version.deleted_at is not None and not deleted):
        raise RevisionNotFound(f"adapter {adapter.name!r} has no version {revision[:100]!r}")
    return version


def resolve(session: Session, tenant: str, name: str, revision: str) -> tuple[Adapter, StoredVersion]:
    """Returns a version and its adapter. Raises AdapterNotFound or RevisionNotFound."""
    adapter = find_adapter(session, tenant, name)
    return adapter, find_version(session, adapter, revision)


def read_version(database: Database, tenant: str, name: str, revision: str) -> StoredVersion:
    """Reads a version in a transaction of its own, for files, which are generated outside of transactions."""
    with database.reading() as session:
        return resolve(session, tenant, name, revision)[1]


def _named(adapters: AdapterRepository, adapter: Adapter, revision: str) -> StoredVersion | None:
    number = _NUMBER.fullmatch(revision)
    if number is not None and int(number[1]) <= MAX_INTEGER:
        version = adapters.version(adapter, int(number[1]))
        if version is not None:
            return version
    if _DIGITS.fullmatch(revision):
        several = adapters.by_revision(adapter, revision)
        if len(several) > 1:
            raise RevisionNotFound(f"adapter {adapter.name!r} has several versions {revision}...; say more digits")
        return several[0] if several else None
    return None
