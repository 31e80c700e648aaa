"""What a name and a revision stand for. Knows no HTTP.

A revision is `main`, a number (`v7` or `7`), a tag, or a version's revision: 40 hexadecimal digits or a prefix of at
least 7 that no other version of the adapter has. What was deleted, and what is another tenant's, is not there.
"""

from __future__ import annotations

import re

from sqlalchemy.orm import Session

from server.adapters.models import Adapter, StoredVersion
from server.adapters.repository import AdapterRepository
from server.db.columns import MOST
from shared.errors import AdapterNotFound, RevisionNotFound
from shared.job import NAME
from shared.registry import LEAST_PREFIX, MAIN, REVISION_DIGITS, check_tag

_NUMBER = re.compile(r"v?([1-9][0-9]{0,9})")
_DIGITS = re.compile(rf"[0-9a-f]{{{LEAST_PREFIX},{REVISION_DIGITS}}}")


def find_adapter(session: Session, tenant: str, name: str, *, lock: bool = False, deleted: bool = False) -> Adapter:
    """A tenant's adapter. Raises AdapterNotFound.

    lock: nobody else changes it meanwhile. deleted: also one that was.
    """
    adapters = AdapterRepository(session)
    found = None
    if re.fullmatch(NAME, name):
        found = adapters.get_locked(tenant, name) if lock else adapters.get(tenant, name)
    if found is None or (found.deleted_at is not None and not deleted):
        raise AdapterNotFound(f"there is no adapter {name!r}")
    return found


def find_version(session: Session, adapter: Adapter, revision: str, *, deleted: bool = False) -> StoredVersion:
    """The version of an adapter that a revision stands for. deleted: also one that was. Raises RevisionNotFound."""
    adapters = AdapterRepository(session)
    if revision == MAIN:
        if adapter.main_version is None:
            raise RevisionNotFound(f"adapter {adapter.name!r} has no `main`: none of its versions is approved")
        revision = f"v{adapter.main_version}"
    found = _named(adapters, adapter, revision)
    if found is None or (found.deleted_at is not None and not deleted):
        raise RevisionNotFound(f"adapter {adapter.name!r} has no version {revision[:100]!r}")
    return found


def resolve(session: Session, tenant: str, name: str, revision: str) -> tuple[Adapter, StoredVersion]:
    """A version and its adapter. Raises AdapterNotFound or RevisionNotFound."""
    adapter = find_adapter(session, tenant, name)
    return adapter, find_version(session, adapter, revision)


def _named(adapters: AdapterRepository, adapter: Adapter, revision: str) -> StoredVersion | None:
    number = _NUMBER.fullmatch(revision)
    if number is not None and int(number[1]) <= MOST:
        found = adapters.version(adapter, int(number[1]))
        if found is not None:
            return found
    if _DIGITS.fullmatch(revision):
        several = adapters.by_revision(adapter, revision)
        if len(several) > 1:
            raise RevisionNotFound(f"adapter {adapter.name!r} has several versions {revision}...; say more digits")
        return several[0] if several else None
    try:
        return adapters.by_tag(adapter, check_tag(revision))
    except ValueError:
        return None
