"""The whole schema in one import, and bringing a database up to it. Imported by migrations and wiring."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine

from server.adapters import models as adapters
from server.artifacts import models as artifacts
from server.auth import models as auth
from server.bases import models as bases
from server.db.columns import Table
from server.devices import models as devices
from server.jobs import models as jobs
from server.leases import models as leases
from server.programs import models as programs
from server.queue import models as queue
from server.runners import models as runners
from server.succession import models as succession

__all__ = [
    "METADATA",
    "adapters",
    "artifacts",
    "auth",
    "bases",
    "devices",
    "jobs",
    "leases",
    "programs",
    "queue",
    "runners",
    "succession",
    "upgrade",
]

METADATA = Table.metadata


def upgrade(engine: Engine) -> None:
    """Applies every migration that `engine`'s database lacks."""
    config = Config()
    config.set_main_option("script_location", str(files("server.migrations")))
    with engine.execution_options(writes=True).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
