"""Applies and reverts migrations of the database schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, func, select

_MIGRATION_LOCK = int.from_bytes(b"mobizo")


def migrations() -> Config:
    """Returns Alembic's configuration with the location of the migrations."""
    config = Config()
    config.set_main_option("script_location", str(files("server.database.migrations")))
    return config


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Applies every missing migration up to `revision`. Concurrent callers wait for the one that applies them."""
    with migrating(engine) as config:
        command.upgrade(config, revision)


def downgrade(engine: Engine, revision: str) -> None:
    """Reverts every migration after `revision`, or all with `base`. Data in their tables and columns is lost."""
    with migrating(engine) as config:
        command.downgrade(config, revision)


@contextmanager
def migrating(engine: Engine) -> Iterator[Config]:
    """Yields Alembic's configuration with a transaction that holds the migration lock of the database."""
    config = migrations()
    with engine.execution_options(writes=True).connect() as connection:
        config.attributes["connection"] = connection
        if connection.dialect.name == "sqlite":
            # SQLite changes a table by recreating it, which must not trigger foreign keys. The pragma has no effect
            # within a transaction.
            driver: Any = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys = OFF")
            try:
                with connection.begin():
                    yield config
                    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
                    if broken:
                        raise RuntimeError(f"the migration would leave dangling foreign keys: {broken[:5]}")
            finally:
                driver.execute("PRAGMA foreign_keys = ON")
            return
        with connection.begin():
            # No time limits: tables may be large, and another process may be migrating.
            for limit in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout"):
                connection.exec_driver_sql(f"SET LOCAL {limit} = 0")
            connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            yield config
