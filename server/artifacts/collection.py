"""The collector: removes files that nothing names, and what killed writers left half-written.

A file is given time: it is stored before it is named, so one that is young may be about to be. What is removed all the
same is found missing by who would name it (`server.artifacts.naming`). Knows no HTTP and no terminal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

import structlog

from server.artifacts.naming import begin_pass, end_pass, hold_alone, named
from server.artifacts.store import ArtifactStore, StoredFile
from server.clock import utc_now
from server.db.database import Database
from server.settings import Settings
from shared.errors import MobizoError

LOOKED_UP_AT_ONCE = 500
REMOVED_AT_ONCE = 100  # while those who name files wait
HALF_WRITTEN = timedelta(hours=1)  # least age of a leftover: nothing tells whether somebody writes it still
LOOK_SECONDS = 600.0  # between two looks whether a pass is due
_log = structlog.get_logger()


@dataclass
class Found:
    """What a pass found, or would remove."""

    files: int = 0
    deleted: int = 0
    freed_bytes: int = 0
    leftovers: int = 0


@dataclass(frozen=True)
class Collector:
    """The collector of one server's files. stopped: asked often; a pass ends early once it is true."""

    database: Database
    artifacts: ArtifactStore
    stopped: Callable[[], bool] = lambda: False

    def collect(self, grace: timedelta, *, dry_run: bool = False, unless_within: timedelta | None = None) -> Found:
        """One pass. grace: the age from which an unnamed file is removed.

        unless_within: nothing happens if a pass began that recently. Raises Unavailable if the store does not answer.
        """
        found, now = Found(), utc_now()
        if not dry_run:
            with self.database.writing() as session:
                if not begin_pass(session, now, now - unless_within if unless_within else None):
                    return found
        for batch in _batches(self.artifacts.listing(), LOOKED_UP_AT_ONCE):
            if self.stopped():
                return found
            found.files += len(batch)
            old = [file for file in batch if file.stored_at < now - grace]
            with self.database.reading() as session:
                known = named(session, [file.sha256 for file in old]) if old else set()
            for few in _batches((file for file in old if file.sha256 not in known), REMOVED_AT_ONCE):
                gone = few if dry_run else self._remove(few, now - grace)
                found.deleted += len(gone)
                found.freed_bytes += sum(file.size for file in gone)
        for leftover in self.artifacts.leftovers(now - max(grace, HALF_WRITTEN)):
            found.leftovers += 1
            if not dry_run:
                self.artifacts.discard(leftover)
        if not dry_run:
            with self.database.writing() as session:
                end_pass(session, utc_now(), found.deleted, found.freed_bytes)
        return found

    def _remove(self, files: list[StoredFile], before: datetime) -> list[StoredFile]:
        """Removes those that are still unnamed and were not stored again since they were listed."""
        with self.database.writing() as session:
            hold_alone(session)
            known = named(session, [file.sha256 for file in files])
            gone = [file for file in files if file.sha256 not in known and self._still_old(file, before)]
            self.artifacts.delete([file.sha256 for file in gone])
        return gone

    def _still_old(self, file: StoredFile, before: datetime) -> bool:
        stored_at = self.artifacts.stored_at(file.sha256)
        return stored_at is not None and stored_at < before


class Housekeeping:
    """The collector as a worker runs it, between other things: rarely, and one worker at a time."""

    def __init__(self, settings: Settings, collector: Collector) -> None:
        self._collector = collector
        self._every = timedelta(hours=settings.collect_hours)
        self._grace = timedelta(hours=settings.collect_grace_hours)
        self._next = time.monotonic() + LOOK_SECONDS

    def look(self) -> None:
        """A pass, if it is time for one."""
        if not self._every or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK_SECONDS
        try:
            found = self._collector.collect(self._grace, unless_within=self._every)
        except MobizoError as error:
            _log.error("collection-failed", code=error.code, detail=error.detail)
            return
        if found.files:
            _log.info("files-collected", files=found.files, deleted=found.deleted, freed_bytes=found.freed_bytes)


def _batches(files: Iterable[StoredFile], size: int) -> Iterator[list[StoredFile]]:
    iterator = iter(files)
    while batch := list(islice(iterator, size)):
        yield batch
