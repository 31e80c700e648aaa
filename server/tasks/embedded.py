"""The default engine: the worker polls the task table. It needs only the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from server.tasks.outage import OUTAGES

if TYPE_CHECKING:
    from server.tasks.engine import Worker

_log = structlog.get_logger()


class EmbeddedEngine:
    """Polls every `poll_seconds`, and at once after a task."""

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds

    def run(self, worker: Worker) -> None:
        """Runs the worker until it is stopping, and retries while the database is unavailable."""
        while not worker.stopping.is_set():
            try:
                if worker.look_around() and worker.work():
                    continue
            except OUTAGES as error:
                _log.warning("database-away", worker=worker.id, error=str(error))
            worker.stopping.wait(self._poll_seconds)
