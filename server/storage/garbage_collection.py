"""Garbage collection: removes unreferenced files, and incomplete files of killed writers.

Files are stored before they are referenced, so unreferenced files are kept for a grace period. A transaction that
references a file which was removed meanwhile fails (`server.storage.store`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

import structlog

from server.database.columns import utc_now
from server.database.database import Database
from server.settings import Settings
from server.storage.store import ArtifactStore, StoredFile, begin_pass, delete_unreferenced, end_pass, referenced

LOOKED_UP_AT_ONCE = 500
REMOVED_AT_ONCE = 100  # in one transaction, during which new references wait
HALF_WRITTEN = timedelta(hours=1)  # minimum age of a leftover, because younger ones may still be being written
_log = structlog.get_logger()


@dataclass
class CollectionResult:
    """The counts of one pass, or of a dry run."""

    files: int = 0
    deleted: int = 0
    freed_bytes: int = 0
    leftovers: int = 0


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
            with self.database.writing() as session:
                if not begin_pass(session, now, now - unless_within if unless_within else None):
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
        for leftover in self.artifacts.leftovers(now - max(grace, HALF_WRITTEN)):
            result.leftovers += 1
            if not dry_run:
                self.artifacts.discard(leftover)
        if not dry_run:
            with self.database.writing() as session:
                end_pass(session, utc_now(), result.deleted, result.freed_bytes)
        return result

    def _remove(self, files: list[StoredFile], before: datetime) -> list[StoredFile]:
        """Removes those files that are still unreferenced and were not stored again since they were listed."""
        old = [file for file in files if self._still_old(file, before)]
        with self.database.writing() as session:
            removed = delete_unreferenced(session, self.artifacts, [file.sha256 for file in old])
        return [file for file in old if file.sha256 in removed]

    def _still_old(self, file: StoredFile, before: datetime) -> bool:
        stored_at = self.artifacts.stored_at(file.sha256)
        return stored_at is not None and stored_at < before


class Housekeeping:
    """The sweep of a worker that collects garbage: rarely, and in one worker at a time."""

    def __init__(self, settings: Settings, collector: Collector) -> None:
        self._collector = collector
        self._every = timedelta(hours=settings.collect_hours)
        self._grace = timedelta(hours=settings.collect_grace_hours)

    def run(self) -> None:
        """Runs a pass if one is due."""
        if not self._every:
            return
        result = self._collector.collect(self._grace, unless_within=self._every)
        if result.files:
            _log.info("files-collected", files=result.files, deleted=result.deleted, freed_bytes=result.freed_bytes)


def _batches(files: Iterable[StoredFile], size: int) -> Iterator[list[StoredFile]]:
    iterator = iter(files)
    while batch := list(islice(iterator, size)):
        yield batch
