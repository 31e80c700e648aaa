"""The whole schema in one import, and bringing a database up to it. Imported by migrations and wiring."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, func, select

from server.adapters import models as adapters
from server.answers import models as answers
from server.artifacts import models as artifacts
from server.assignments import models as assignments
from server.auth import models as auth
from server.bases import models as bases
from server.calibrations import models as calibrations
from server.cohorts import models as cohorts
from server.db.columns import Table
from server.devices import models as devices
from server.formats import models as formats
from server.history import models as history
from server.jobs import models as jobs
from server.leases import models as leases
from server.masking import models as masking
from server.privacy import models as privacy
from server.programs import models as programs
from server.queue import models as queue
from server.runners import models as runners
from server.succession import models as succession

__all__ = [
    "METADATA",
    "adapters",
    "answers",
    "artifacts",
    "assignments",
    "auth",
    "bases",
    "calibrations",
    "cohorts",
    "devices",
    "downgrade",
    "formats",
    "history",
    "jobs",
    "leases",
    "masking",
    "migrating",
    "migrations",
    "privacy",
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


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Applies every migration up to `revision` that a database lacks; of several who do, one does, the others wait."""
    with migrating(engine) as config:
        command.upgrade(config, revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Takes every migration after `revision` back; `base`: all of them. What only they could hold is lost."""
    with migrating(engine) as config:
        command.downgrade(config, revision)


@contextmanager
def migrating(engine: Engine) -> Iterator[Config]:
    """Alembic's configuration, with a transaction that is the only one to migrate this database now."""
    config = migrations()
    with engine.execution_options(writes=True).connect() as connection:
        config.attributes["connection"] = connection
        if connection.dialect.name == "sqlite":
            # A table is changed by making it anew, and what refers to it must not notice. Only so before it begins.
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys = OFF")
            try:
                with connection.begin():
                    yield config
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                    if broken:
                        raise RuntimeError(f"migrating would leave rows that refer to nothing: {broken[:5]}")
            finally:
                driver.execute("PRAGMA foreign_keys = ON")
            return
        with connection.begin():
            # As long as it takes: tables may be large, and another process may be at it.
            for limit in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                connection.exec_driver_sql(f"SET LOCAL {limit} = 0")
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            yield config
