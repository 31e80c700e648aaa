"""Engines, which the settings choose: an engine wakes workers; the task table decides what runs.

`EmbeddedEngine` is the default: the worker polls the task table. It needs only the database. `insist` repeats a
transaction until a temporary outage of the database ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import structlog
from sqlalchemy.engine import make_url

from server.database.database import Collision, Database, DatabaseUnavailable
from server.settings import Settings
from shared.errors import BadRequest
from shared.stop_signal import StopSignal

_log = structlog.get_logger()
OUTAGES = (DatabaseUnavailable, Collision)
WAIT_SECONDS = 1.0
Value = TypeVar("Value")


class Worker(Protocol):
    """A worker as an engine sees it: one process that runs one task at a time."""

    id: str
    stopping: StopSignal

    def work(self) -> bool:
        """Claims the next task and runs it. Returns False if there was none."""

    def look_around(self) -> bool:
        """Does periodic work. Returns whether there may be a task to claim."""

    def startable(self, limit: int) -> list[str]:
        """Returns the names of tasks that may be claimed now."""


class Engine(Protocol):
    """Wakes a worker for waiting tasks."""

    def run(self, worker: Worker) -> None:
        """Runs the worker until it is stopping."""


def engine_of(settings: Settings) -> Engine:
    """Returns the engine that the settings name. Raises BadRequest if it cannot run on their database."""
    if settings.engine == "embedded":
        return EmbeddedEngine(settings.poll_seconds)
    _check(settings)
    # Imported only where it runs, because it loads a PostgreSQL client.
    from server.tasks.procrastinate_engine import ProcrastinateEngine

    return ProcrastinateEngine(settings)


def prepare_engine(database: Database, settings: Settings) -> None:
    """Creates the engine's own tables if it has any; raises as `engine_of`.

    From now on, tasks that transactions of `database` schedule are announced to workers when they commit.
    """
    if settings.engine == "procrastinate":
        _check(settings)
        from server.tasks.procrastinate_engine import announce_scheduled, prepare_schema

        prepare_schema(database.engine)
        database.before_commit(announce_scheduled)


def _check(settings: Settings) -> None:
    if make_url(settings.url).get_backend_name() != "postgresql":
        raise BadRequest(
            "MOBIZO_ENGINE is procrastinate, which needs PostgreSQL; name one in MOBIZO_DATABASE_URL, or leave the "
            "engine embedded"
        )


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


def insist(do: Callable[[], Value], giving_up: StopSignal) -> Value:
    """Runs `do`, one transaction, until the database is available; raises its error once `giving_up` is set."""
    while True:
        try:
            return do()
        except OUTAGES as error:
            _log.warning("database-away", error=str(error))
            if giving_up.wait(WAIT_SECONDS):
                raise
