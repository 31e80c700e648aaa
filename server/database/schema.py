"""Where the migrations are, the lock under which they are applied, and checks that a database has all of this release.

A newer database is accepted: migrations are applied first, then servers are replaced one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any

from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, func, inspect, select
from sqlalchemy.exc import OperationalError

from shared.errors import Unavailable

_MIGRATION_LOCK = int.from_bytes(b"mobizo")


def migrations() -> Config:
    """Returns Alembic's configuration with the location of the migrations."""
    config = Config()
    config.set_main_option("script_location", str(files("server.database.migrations")))
    return config


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


class SchemaBehind(Unavailable, title="Database not up to date"):
    """The database lacks migrations of this release; run `mobizo-server migrate` once, then start the servers."""


@cache
def release() -> tuple[str, ...]:
    """Returns the migrations of this release, first to last."""
    script = ScriptDirectory.from_config(migrations())
    return tuple(revision.revision for revision in script.walk_revisions())[::-1]


def lacking(connection: Connection) -> tuple[str, ...]:
    """Returns the migrations that the database lacks, in order; all of them if it is empty."""
    at = MigrationContext.configure(connection).get_current_revision()
    if at is None:
        return release()
    return release()[release().index(at) + 1 :] if at in release() else ()


def missing_columns(connection: Connection, metadata: MetaData) -> list[str]:
    """Returns the columns of this release that the database lacks, as `table.column`.

    A database at the latest migration lacks none, unless a migration was changed after it was applied.
    """
    inspector = inspect(connection)
    present = {
        table: {column["name"] for column in inspector.get_columns(table)} for table in inspector.get_table_names()
    }
    columns = (column for table in metadata.sorted_tables for column in table.columns)
    return [str(column) for column in columns if column.name not in present.get(column.table.name, ())]


def check_current(connection: Connection) -> None:
    """Raises SchemaBehind if the database lacks a migration."""
    if missing := lacking(connection):
        raise SchemaBehind(
            f"the database lacks {len(missing)} migration{'s' * (len(missing) > 1)} of this release; run "
            "`mobizo-server migrate` once, then start the servers"
        )


@contextmanager
def reached(engine: Engine) -> Iterator[Connection]:
    """Yields a connection. Raises Unavailable, without the password, if the database cannot be reached."""
    try:
        with engine.connect() as connection:
            yield connection
    except OperationalError as error:
        why = str(error.orig).strip().partition("\n")[0]
        raise Unavailable(f"the database cannot be reached ({why}); check MOBIZO_DATABASE_URL") from error
