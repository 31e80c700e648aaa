"""Lists the stored files that a database references, for a backup."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.orm import Session

from server.storage.references import REFERENCES, FileColumn


def _columns(*, temporary: bool) -> list[FileColumn]:
    return [each for feature in REFERENCES.get() for each in feature.columns if each.temporary is temporary]


def named_files(session: Session) -> frozenset[str]:
    """Returns the sha256 of every file that the backup must contain."""
    named: set[str] = set()
    for each in _columns(temporary=False):
        named |= set(session.scalars(select(each.column).where(each.rows, each.column.is_not(None)).distinct()))
    for feature in REFERENCES.get():
        named.update(feature.documents(session))
    return frozenset(named)


def uploaded_files(session: Session) -> frozenset[str]:
    """Returns the sha256 of uploads for leases that are not completed. The file of an ended lease may be missing."""
    columns = [each.column for each in _columns(temporary=True)]
    found = [session.scalars(select(column).where(column.is_not(None)).distinct()) for column in columns]
    return frozenset(sha256 for few in found for sha256 in few if sha256 is not None)
