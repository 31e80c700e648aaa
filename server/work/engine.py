"""The port: what an engine does for a worker and for a server. Which one, the settings say.

The tables of jobs, programs and conversions are the truth whichever engine runs: it only brings workers to look. Knows
no compiler.
"""

from __future__ import annotations

import threading
from typing import Protocol

from sqlalchemy.engine import make_url

from server.db.database import Database
from server.settings import Settings
from server.work.embedded import EmbeddedEngine
from shared.errors import BadRequest


class Worker(Protocol):
    """What an engine drives: one process that makes one program or conversion at a time."""

    id: str
    stopping: threading.Event

    def work(self) -> bool:
        """Claims what has its turn and brings it to an end; False if there was none to claim."""

    def look_around(self) -> bool:
        """Takes back what the dead held; True if there may be something to claim."""

    def startable(self, limit: int) -> list[str]:
        """Recipe ids of programs and ids of conversions that wait and might be claimed now."""


class Engine(Protocol):
    """Brings a worker to the programs that wait."""

    def run(self, worker: Worker) -> None:
        """Lets the worker work until it is stopping."""


def engine_of(settings: Settings) -> Engine:
    """The engine that the settings name. Raises BadRequest if it cannot run on their database."""
    if settings.engine == "embedded":
        return EmbeddedEngine(settings.poll_seconds)
    _check(settings)
    # Not imported where it does not run: it brings a client of PostgreSQL.
    from server.work.procrastinated import ProcrastinateEngine

    return ProcrastinateEngine(settings)


def prepare_engine(database: Database, settings: Settings) -> None:
    """Makes what the engine keeps in the database, if it is not there; raises as `engine_of` does.

    From now on what transactions of `database` ask to have compiled is told to workers as they are committed.
    """
    if settings.engine == "procrastinate":
        _check(settings)
        from server.work.procrastinated import prepare_schema, tell_wanted

        prepare_schema(database.engine)
        database.before_commit(tell_wanted)


def _check(settings: Settings) -> None:
    if make_url(settings.url).get_backend_name() != "postgresql":
        raise BadRequest(
            "MOBIZO_ENGINE is procrastinate, which needs PostgreSQL; name one in MOBIZO_DATABASE_URL, or leave the "
            "engine embedded"
        )
