"""A worker's part in conversions: it claims one, has a child process make it, and publishes the files.

The worker around it (`server.worker`) says when. Imports no torch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog
from sqlalchemy.orm import Session

from server.artifacts.naming import hold
from server.artifacts.store import ArtifactStore
from server.calibrations.reading import calibration_file
from server.db.database import Database
from server.formats.converter_process import RESULT, ConverterCrashed, ConverterProcess, Order
from server.formats.queue import Assignment, ConversionQueue
from server.history.remaking import b_file
from server.settings import Settings
from server.work.child import ChildProcess, Stopped
from server.work.outage import OUTAGES, insist
from shared.errors import MobizoError, Unavailable
from shared.protocol import PeftFile

Ended = TypeVar("Ended")
_log = structlog.get_logger()


@dataclass(frozen=True)
class ConversionWork:
    """Conversions of one worker. beat: called with the process now and then while one runs, outside of transactions."""

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    worker_id: str
    stopping: threading.Event
    interval: float
    sweep: Callable[[], None]
    beat: Callable[[ChildProcess | None], None]

    def work(self) -> bool:
        """Claims the conversion whose turn it is and makes it to an end; False if there was none to claim."""
        with self.database.writing() as session:
            assignment = self.queue(session).claim()
            session.flush()
            session.expunge_all()
        if assignment is None:
            return False
        self._convert(assignment)
        return True

    def queue(self, session: Session) -> ConversionQueue:
        """The queue in a transaction, as this worker sees it."""
        return ConversionQueue(session, self.settings, self.worker_id)

    def _convert(self, assignment: Assignment) -> None:
        version = assignment.version
        log = _log.bind(worker=self.worker_id, conversion=assignment.id)
        converter = ConverterProcess(
            command=self.settings.converter_command,
            interval=self.interval,
            memory_limit=self.settings.compile_memory_bytes,
            keep=lambda: self._keep(assignment.id, converter),
            hear=lambda said: log.info("converting", said=said),
        )
        log.info("conversion-started")
        self.sweep()
        with self.artifacts.workspace(self.worker_id) as workspace:
            try:
                order = Order(recipe=version.recipe, shape=version.shape, a_sha256=version.a_sha256)
                raw_b = self.artifacts.read(b_file(self.database, self.artifacts, version))
                calibration = calibration_file(self.artifacts, version.recipe)
                outcome = converter.run(order, raw_b, assignment.source, workspace, calibration)
                if isinstance(outcome, Stopped):
                    self._end(lambda queue: queue.release(assignment.id))
                    log.info("conversion-stopped")
                else:
                    for file in outcome:
                        self.artifacts.adopt(workspace / RESULT / file.path, file.sha256)
                    log.info("conversion-finished", counted=self._finish(assignment, outcome))
            except (ConverterCrashed, Unavailable) as error:
                reason = error
                self._end(lambda queue: queue.retry(assignment.id, reason))
                log.error("conversion-crashed", detail=error.detail)
            except MobizoError as error:
                refusal = error
                self._end(lambda queue: queue.fail(assignment.id, refusal))
                log.error("conversion-failed", code=error.code, detail=error.detail)
        self.beat(converter)

    def _finish(self, assignment: Assignment, files: list[PeftFile]) -> bool:
        def finish() -> bool:
            with self.database.writing() as session:
                hold(session, self.artifacts, [file.sha256 for file in files])
                return self.queue(session).finish(assignment.id, files)

        return insist(finish, self.stopping)

    def _end(self, end: Callable[[ConversionQueue], Ended]) -> Ended:
        """Ends a claim in one transaction, however long the database is away; a claim lost meanwhile counts nothing."""

        def ended() -> Ended:
            with self.database.writing() as session:
                return end(self.queue(session))

        return insist(ended, self.stopping)

    def _keep(self, conversion_id: str, converter: ConverterProcess) -> bool:
        if self.stopping.is_set():
            return False
        try:
            self.beat(converter)
            with self.database.writing() as session:
                return self.queue(session).keep(conversion_id)
        except OUTAGES as error:
            # It goes on: if the claim is lost meanwhile, what it makes is not counted.
            _log.warning("database-away", worker=self.worker_id, error=str(error))
            return True
