"""The default engine: the worker looks into the table again and again. Needs nothing but the database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from server.work.outage import OUTAGES

if TYPE_CHECKING:
    from server.work.engine import Worker

_log = structlog.get_logger()


class EmbeddedEngine:
    """Looks every `poll_seconds`, and at once after a compile."""

    def __init__(self, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds

    def run(self, worker: Worker) -> None:
        """Lets the worker work until it is stopping; a database that is away is waited for."""
        while not worker.stopping.is_set():
            try:
                if worker.look_around() and worker.work():
                    continue
            except OUTAGES as error:
                _log.warning("database-away", worker=worker.id, error=str(error))
            worker.stopping.wait(self._poll_seconds)
