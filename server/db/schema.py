"""The whole schema in one import, and bringing a database up to it. Imported by migrations and wiring."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, func, select

from server.adapters import models as adapters
from server.answers import models as answers
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
    "answers",
    "artifacts",
    "auth",
    "bases",
    "devices",
    "jobs",
    "leases",
    "migrations",
    "programs",
    "queue",
    "runners",
    "succession",
    "upgrade",
]

METADATA = Table.metadata
_MIGRATION_LOCK = int.from_bytes(b"mobizo")


def migrations() -> Config:
    """Alembic's configuration: where the migrations are."""
    config = Config()
    config.set_main_option("script_location", str(files("server.migrations")))
    return config


def upgrade(engine: Engine) -> None:
    """Applies every migration that `engine`'s database lacks; of several who do, one does and the others wait."""
    config = migrations()
    with engine.execution_options(writes=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
