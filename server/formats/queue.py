"""Who converts what: workers claim conversions, keep them by heartbeats, and end with files or a reason.

As with compiles (`server.programs.compilation`), the table decides: a worker that is killed stops its heartbeats, and
the conversion is another's when its time is over. What such a worker would still report counts no more, so one set of
files results. Knows no converter and no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from server.adapters.models import StoredVersion
from server.bases.repository import BaseRepository
from server.clock import utc_now
from server.formats.lifecycle import move
from server.formats.models import Conversion, ConversionFile, ConversionState
from server.formats.repository import ConversionRepository
from server.programs.room import MemoryRoom, backoff
from server.programs.waiting import WaitingRepository
from server.settings import Settings
from shared.errors import BaseMismatch, ConversionFailed, ConversionTooLarge, MobizoError
from shared.job import JobError
from shared.protocol import PeftFile

_MAX_DETAIL = 4000


@dataclass(frozen=True)
class Assignment:
    """What a worker has to convert, and where the base model lies."""

    id: str
    version: StoredVersion
    source: str


class ConversionQueue:
    """Conversions to make, in one writing transaction."""

    def __init__(self, session: Session, settings: Settings, worker_id: str) -> None:
        self._conversions = ConversionRepository(session)
        self._waiting = WaitingRepository(session)
        self._bases = BaseRepository(session)
        self._settings = settings
        self._worker_id = worker_id

    def claim(self) -> Assignment | None:
        """The conversion whose turn it is and that this worker's machine has memory for, now this worker's; or None.

        One whose workers died too often, that fits no machine, or whose base model is gone, fails here.
        """
        now = utc_now()
        for lapsed in self._conversions.lapsed(now):
            self._lost(lapsed)
        room = MemoryRoom(self._waiting, self._worker_id, now)
        while (found := self._conversions.next(now)) is not None:
            conversion, tenant = found
            if conversion.memory_bytes > (most := room.most_bytes()):
                self._fail(conversion, _too_large(conversion, int(most)))
                continue
            if not room.fits(conversion.memory_bytes):
                if room.worth_waiting(conversion.memory_bytes, conversion.created_at):
                    return None
                if (found := self._conversions.next(now, room.free_bytes())) is None:
                    return None
                conversion, tenant = found
            assignment = self._assignment(conversion)
            if assignment is None:
                continue
            self._waiting.took_turn(tenant)
            move(
                conversion,
                ConversionState.CONVERTING,
                worker_id=self._worker_id,
                attempts=conversion.attempts + 1,
                started_at=now,
                lease_expires_at=self._lease(),
            )
            return assignment
        return None

    def keep(self, conversion_id: str) -> bool:
        """A heartbeat. False if the conversion is to stop: its version was removed, or it is another's."""
        conversion = self._conversions.held(conversion_id, self._worker_id)
        if conversion is None:
            return False
        conversion.lease_expires_at = self._lease()
        return True

    def finish(self, conversion_id: str, files: Sequence[PeftFile]) -> bool:
        """The files are there. False, and nothing happens, if it was not this worker's."""
        conversion = self._conversions.held(conversion_id, self._worker_id)
        if conversion is None:
            return False
        self._conversions.add_files(
            [
                ConversionFile(conversion_number=conversion.number, path=file.path, size=file.size, sha256=file.sha256)
                for file in files
            ]
        )
        move(conversion, ConversionState.READY, ready_at=utc_now(), error=None)
        return True

    def fail(self, conversion_id: str, error: MobizoError) -> None:
        """It cannot be made; a request anew tries again."""
        conversion = self._conversions.held(conversion_id, self._worker_id)
        if conversion is not None:
            self._fail(conversion, error)

    def retry(self, conversion_id: str, error: MobizoError) -> None:
        """The converter crashed: another try after a while, or failure with `error` if there were enough."""
        conversion = self._conversions.held(conversion_id, self._worker_id)
        if conversion is None:
            return
        if conversion.attempts >= self._settings.compile_attempts:
            self._fail(conversion, error)
            return
        wait = backoff(self._settings, conversion.attempts)
        move(conversion, ConversionState.PENDING, next_attempt_at=utc_now() + wait)

    def release(self, conversion_id: str) -> None:
        """The worker stops; the try does not count."""
        conversion = self._conversions.held(conversion_id, self._worker_id)
        if conversion is not None:
            move(conversion, ConversionState.PENDING, attempts=conversion.attempts - 1)

    def vanished(self, conversion_id: str, worker_id: str) -> None:
        """Takes a conversion back from a worker whose process is known to be dead, before its time is over."""
        conversion = self._conversions.held(conversion_id, worker_id)
        if conversion is not None:
            self._lost(conversion)

    def _lost(self, conversion: Conversion) -> None:
        """The worker died; perhaps the conversion killed it."""
        if conversion.attempts >= self._settings.compile_attempts:
            why = ConversionFailed("the converter was killed every time; is there enough memory?")
            self._fail(conversion, why)
        else:
            move(conversion, ConversionState.PENDING)

    def _assignment(self, conversion: Conversion) -> Assignment | None:
        """What to convert; None, and the conversion failed, if the base model is not registered any more."""
        _, version = self._conversions.version(conversion)
        base = self._bases.by_name(version.recipe.base.name)
        if base is None or base.sha256 != version.recipe.base.sha256:
            self._fail(conversion, BaseMismatch())
            return None
        return Assignment(conversion.id, version, base.source)

    def _lease(self) -> datetime:
        return utc_now() + timedelta(seconds=self._settings.compile_lease_seconds)

    def _fail(self, conversion: Conversion, error: MobizoError) -> None:
        reason = JobError(code=error.code, detail=error.detail[:_MAX_DETAIL])
        move(conversion, ConversionState.FAILED, error=reason)


def _too_large(conversion: Conversion, most: int) -> ConversionTooLarge:
    return ConversionTooLarge(
        f"merging this takes about {conversion.memory_bytes:,} bytes of memory, and no machine with workers may give "
        f"more than {most:,} (MOBIZO_COMPILE_BUDGET_BYTES); take the adapter by itself, or a larger machine"
    )
