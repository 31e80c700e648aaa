"""A worker's part in rounds: it claims one, makes the version of its updates, and publishes it.

Meanwhile a thread keeps the claim. After a kill -9 it is simply done again. Imports neither torch nor a web framework.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import structlog

from server.artifacts.store import ArtifactStore
from server.cohorts.arithmetic import NoVersion, make_version
from server.cohorts.publication import Publisher, StoredFiles
from server.cohorts.queue import Assignment, RoundQueue
from server.db.database import Database
from server.masking.progress import round_total
from server.settings import Settings
from server.work.outage import OUTAGES, insist
from shared.errors import InvalidUpload, MobizoError, Untrusted
from shared.masking.fixed_point import Total

Ended = TypeVar("Ended")
_log = structlog.get_logger()


@dataclass(frozen=True)
class RoundWork:
    """Rounds of one worker. beat: called now and then while one is worked on, outside of transactions."""

    settings: Settings
    database: Database
    artifacts: ArtifactStore
    worker_id: str
    stopping: threading.Event
    interval: float
    beat: Callable[[], None]

    def work(self) -> bool:
        """Claims the round whose version is to be made first and makes it; False if there was none to claim."""
        with self.database.writing() as session:
            assignment = RoundQueue(session, self.settings, self.worker_id).claim()
        if assignment is None:
            return False
        log = _log.bind(worker=self.worker_id, cohort=assignment.cohort, round=assignment.position)
        log.info("aggregation-started", updates=len(assignment.updates))
        try:
            with self._keeping(assignment.round_id):
                made = make_version(self.artifacts, assignment, self._total(assignment))
                stored = StoredFiles(
                    self.artifacts.put(made.adapter), len(made.adapter), self.artifacts.put(made.optimizer)
                )
            log.info("aggregation-finished", counted=self._publish(assignment, stored))
        except NoVersion as error:
            why = error.detail
            self._end(lambda queue: queue.fail(assignment.round_id, why))
            log.error("aggregation-failed", detail=why)
        except MobizoError as error:
            why = error.detail
            self._end(lambda queue: queue.retry(assignment.round_id, why))
            log.error("aggregation-put-off", code=error.code, detail=why)
        return True

    def _total(self, assignment: Assignment) -> Total | None:
        """The sum of a round's masked updates; None where they are not masked. Raises NoVersion."""
        if assignment.settings.masking is None:
            return None
        try:
            return round_total(self.database, self.artifacts, assignment.round_id)
        except (Untrusted, InvalidUpload) as error:
            raise NoVersion(error.detail) from error

    def _publish(self, assignment: Assignment, stored: StoredFiles) -> bool:
        publisher = Publisher(self.settings, self.artifacts, self.worker_id)

        def publish() -> bool:
            with self.database.writing() as session:
                return publisher.publish(session, assignment, stored)

        return insist(publish, self.stopping)

    def _end(self, end: Callable[[RoundQueue], Ended]) -> Ended:
        """Ends a claim in one transaction, however long the database is away; a claim lost meanwhile counts nothing."""

        def ended() -> Ended:
            with self.database.writing() as session:
                return end(RoundQueue(session, self.settings, self.worker_id))

        return insist(ended, self.stopping)

    @contextmanager
    def _keeping(self, round_id: str) -> Iterator[None]:
        """Keeps the claim until the block ends."""
        done = threading.Event()
        thread = threading.Thread(target=self._keep, args=(round_id, done), name="aggregation")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _keep(self, round_id: str, done: threading.Event) -> None:
        while not done.wait(self.interval):
            try:
                self.beat()
                with self.database.writing() as session:
                    RoundQueue(session, self.settings, self.worker_id).keep(round_id)
            except OUTAGES as error:
                # It goes on: if the claim is lost meanwhile, what it makes is not counted.
                _log.warning("database-away", worker=self.worker_id, error=str(error))
