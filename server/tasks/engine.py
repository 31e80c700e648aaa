"""The interface of engines, which the settings choose. An engine wakes workers; the task table decides what runs."""

from __future__ import annotations

from typing import Protocol

from sqlalchemy.engine import make_url

from server.database.database import Database
from server.settings import Settings
from server.tasks.embedded import EmbeddedEngine
from shared.errors import BadRequest
from shared.stop_signal import StopSignal


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
