"""Garbage collection: removes unreferenced files.

Files are stored before they are referenced, so unreferenced files are kept for a grace period. A removal has three
steps: a short transaction marks files that nothing references (`FileRemoval`), the store deletes them, and a second
transaction removes the marks. `hold` refuses marked files, so that a file which is stored again meanwhile is sent once
more. What a killed process marked is removed by the next pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

import structlog
from sqlalchemy import ColumnElement, delete, or_, select, update

from server.database.columns import utc_now
from server.database.database import Database
from server.settings import Settings
from server.storage.store import THE_ROW, ArtifactStore, FileRemoval, GarbageCollection, StoredFile, referenced
from shared.errors import Unavailable

LOOKED_UP_AT_ONCE = 500
REMOVED_AT_ONCE = 100
MAX_REMOVAL = timedelta(minutes=5)  # a process that was suspended for longer deletes nothing any more
ABANDONED = timedelta(minutes=15)  # older removals are finished by another process
_log = structlog.get_logger()


@dataclass
class CollectionResult:
    """The counts of one pass, or of a dry run."""

    files: int = 0
    deleted: int = 0
    freed_bytes: int = 0


@dataclass(frozen=True)
class Collector:
    """Garbage collection of one server's files. stopped: called often; a pass ends early once it returns true."""

    database: Database
    artifacts: ArtifactStore
    stopped: Callable[[], bool] = lambda: False

    def collect(
        self, grace: timedelta, *, dry_run: bool = False, unless_within: timedelta | None = None
    ) -> CollectionResult:
        """Runs one pass. grace: minimum age of removed files.

        unless_within: does nothing if a pass began that recently. Raises Unavailable if the store does not answer.
        """
        result, now = CollectionResult(), utc_now()
        if not dry_run:
            self.finish_abandoned()
            if not self._begin(now, now - unless_within if unless_within else None):
                return result
        for batch in _batches(self.artifacts.listing(), LOOKED_UP_AT_ONCE):
            if self.stopped():
                return result
            result.files += len(batch)
            old = [file for file in batch if file.stored_at < now - grace]
            with self.database.reading() as session:
                in_use = referenced(session, [file.sha256 for file in old]) if old else set()
            for garbage in _batches((file for file in old if file.sha256 not in in_use), REMOVED_AT_ONCE):
                removed = garbage if dry_run else self._remove(garbage, now - grace)
                result.deleted += len(removed)
                result.freed_bytes += sum(file.size for file in removed)
        if not dry_run:
            self._update(ended_at=utc_now(), deleted=result.deleted, freed_bytes=result.freed_bytes)
        return result

    def collect_if_due(self, settings: Settings) -> None:
        """Finishes the removals of killed processes, and runs a pass if one is due. For a sweep of any worker."""
        self.finish_abandoned()
        if settings.collect_hours:
            grace, every = timedelta(hours=settings.collect_grace_hours), timedelta(hours=settings.collect_hours)
            result = self.collect(grace, unless_within=every)
            if result.files:
                _log.info("files-collected", files=result.files, deleted=result.deleted, freed_bytes=result.freed_bytes)

    def finish_abandoned(self) -> None:
        """Removes the files that killed processes marked."""
        now = utc_now()
        with self.database.writing() as session:
            abandoned = update(FileRemoval).where(FileRemoval.begun_at < now - ABANDONED).values(begun_at=now)
            removal = Removal(tuple(session.scalars(abandoned.returning(FileRemoval.sha256))), now)
        delete_files(self.artifacts, removal)
        end_removal(self.database, removal)

    def _begin(self, now: datetime, unless_after: datetime | None) -> bool:
        """Records that a pass begins. Returns False, and the pass must not run, if one began after `unless_after`."""
        begun = GarbageCollection.started_at
        due = () if unless_after is None else (or_(begun.is_(None), begun <= unless_after),)
        return self._update(*due, started_at=now, ended_at=None)

    def _update(self, *conditions: ColumnElement[bool], **values: object) -> bool:
        """Updates the row of the latest pass. Returns whether it fulfilled the conditions."""
        statement = update(GarbageCollection).where(THE_ROW, *conditions).values(values)
        with self.database.writing() as session:
            return session.scalar(statement.returning(GarbageCollection.number)) is not None

    def _remove(self, files: list[StoredFile], before: datetime) -> list[StoredFile]:
        """Removes those files that are still unreferenced and were not stored again since they were listed."""
        old = [file for file in files if self._still_old(file, before)]
        removal = begin_removal(self.database, [file.sha256 for file in old])
        delete_files(self.artifacts, removal)
        end_removal(self.database, removal)
        return [file for file in old if file.sha256 in removal.sha256s]

    def _still_old(self, file: StoredFile, before: datetime) -> bool:
        stored_at = self.artifacts.stored_at(file.sha256)
        return stored_at is not None and stored_at < before


def _batches(files: Iterable[StoredFile], size: int) -> Iterator[list[StoredFile]]:
    iterator = iter(files)
    while batch := list(islice(iterator, size)):
        yield batch


@dataclass(frozen=True)
class Removal:
    """Files that this process has marked for removal."""

    sha256s: tuple[str, ...]
    begun_at: datetime


def begin_removal(database: Database, sha256s: Collection[str]) -> Removal:
    """Marks those of these files that nothing references, after waiting for all transactions that called `hold`."""
    now = utc_now()
    with database.writing() as session:
        session.execute(select(GarbageCollection.number).where(THE_ROW).with_for_update())
        others = session.scalars(select(FileRemoval.sha256).where(FileRemoval.sha256.in_(sha256s)))
        unreferenced = set(sha256s) - referenced(session, sha256s) - set(others)
        session.add_all(FileRemoval(sha256=sha256, begun_at=now) for sha256 in unreferenced)
    return Removal(tuple(sorted(unreferenced)), now)


def delete_files(artifacts: ArtifactStore, removal: Removal) -> None:
    """Deletes marked files, outside of transactions. Raises Unavailable if another process may have taken over."""
    if utc_now() - removal.begun_at > MAX_REMOVAL:
        raise Unavailable("the removal of files was interrupted; the next pass continues it")
    artifacts.delete(removal.sha256s)


def end_removal(database: Database, removal: Removal) -> None:
    """Removes the marks of deleted files."""
    own = FileRemoval.sha256.in_(removal.sha256s), FileRemoval.begun_at == removal.begun_at
    with database.writing() as session:
        session.execute(delete(FileRemoval).where(*own))
