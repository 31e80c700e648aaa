"""References from the database to stored files, and the lock between adding references and removing files.

A transaction that adds a reference calls `hold`; garbage collection removes files in a transaction that called
`lock_references`. So unreferenced files are removed without racing new references.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, CompoundSelect, Select, or_, select, true, union_all, update
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from server.database.columns import Moment, Table
from server.ports import Port
from server.storage.store import ArtifactStore
from shared.errors import NotFound, Unavailable

THE_ONE = 1  # number of the only row


@dataclass(frozen=True)
class FileColumn:
    """A column of sha256 hashes that reference stored files.

    rows: the rows whose hashes count; `join` has the table and the condition if that depends on another table.
    temporary: garbage collection may remove such a file once its row stops counting, and a backup may lack it.
    """

    column: InstrumentedAttribute[str] | InstrumentedAttribute[str | None]
    rows: ColumnElement[bool] = field(default_factory=true)
    join: tuple[type[Table], ColumnElement[bool]] | None = None
    temporary: bool = False


@dataclass(frozen=True, eq=False)
class FileReferences:
    """How the tables of one feature reference stored files.

    documents: returns the hashes that stand inside documents, such as signed JSON, where SQL does not search.
    """

    columns: tuple[FileColumn, ...] = ()
    documents: Callable[[Session], Iterable[str]] = lambda session: ()


# The references of every feature. Garbage collection and backups fail if this port is not connected.
REFERENCES: Port[tuple[FileReferences, ...]] = Port("storage.references")


class GarbageCollection(Table):
    """The latest pass of garbage collection. The first migration inserts the row.

    Transactions that reference files lock it in shared mode; a transaction that removes files locks it exclusively.
    """

    __tablename__ = "collections"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    started_at: Mapped[datetime | None] = mapped_column(Moment)
    ended_at: Mapped[datetime | None] = mapped_column(Moment)
    deleted: Mapped[int] = mapped_column(BigInteger)
    freed_bytes: Mapped[int] = mapped_column(BigInteger)


_ROW = GarbageCollection.number == THE_ONE


class Collected(Unavailable):
    """A file was removed before it was referenced; send it again."""

    code, title = "file-collected", "File collected"


def hold(session: Session, artifacts: ArtifactStore, sha256s: Iterable[str]) -> None:
    """Blocks garbage collection until this writing transaction, which references these files, has ended.

    Raises Collected if one of them is no longer stored.
    """
    session.execute(select(GarbageCollection.number).where(_ROW).with_for_update(read=True))
    for sha256 in sha256s:
        try:
            artifacts.size(sha256)
        except NotFound as error:
            raise Collected(f"the file {sha256} was removed before it was referenced; send it again") from error


def lock_references(session: Session) -> None:
    """Waits for all transactions that called `hold`, and blocks new ones until this writing transaction has ended."""
    session.execute(select(GarbageCollection.number).where(_ROW).with_for_update())


def referenced(session: Session, sha256s: Collection[str]) -> set[str]:
    """Returns those of these files that are referenced."""
    # One statement and so one snapshot: a reference that moves from a lease to a version is never missed.
    hashes = set(session.scalars(_references(list(sha256s))))
    for references in REFERENCES.get():
        hashes.update(references.documents(session))
    return hashes & set(sha256s)


def _references(sha256s: list[str]) -> CompoundSelect[str]:
    columns = [reference for references in REFERENCES.get() for reference in references.columns]
    return union_all(*(_of(reference, sha256s) for reference in columns))


def _of(reference: FileColumn, sha256s: list[str]) -> Select[Any]:
    statement = select(reference.column)
    if reference.join is not None:
        statement = statement.join(*reference.join)
    return statement.where(reference.column.in_(sha256s), reference.rows)


def begin_pass(session: Session, now: datetime, unless_after: datetime | None) -> bool:
    """Records that a pass begins. Returns False, and the pass must not run, if one began after `unless_after`."""
    statement = update(GarbageCollection).where(_ROW)
    if unless_after is not None:
        statement = statement.where(
            or_(GarbageCollection.started_at.is_(None), GarbageCollection.started_at <= unless_after)
        )
    begun = session.execute(statement.values(started_at=now, ended_at=None).returning(GarbageCollection.number))
    return begun.first() is not None


def end_pass(session: Session, now: datetime, deleted: int, freed_bytes: int) -> None:
    """Records the result of a pass."""
    statement = update(GarbageCollection).where(_ROW)
    session.execute(statement.values(ended_at=now, deleted=deleted, freed_bytes=freed_bytes))
