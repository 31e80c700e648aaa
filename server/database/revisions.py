"""Checks whether a database has every migration of this release, and applies missing ones where allowed.

A newer database is accepted: migrations are applied first, then servers are replaced one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from server.database.schema import migrations, upgrade
from shared.errors import Unavailable


class SchemaBehind(Unavailable):
    """The database lacks migrations of this release; run `mobizo-server migrate` once, then start the servers."""

    code, title = "schema-behind", "Database not up to date"


@cache
def release() -> tuple[str, ...]:
    """Returns the migrations of this release, first to last."""
    script = ScriptDirectory.from_config(migrations())
    return tuple(revision.revision for revision in script.walk_revisions())[::-1]


def lacking(connection: Connection) -> tuple[str, ...]:
    """Returns the migrations that the database lacks, in order."""
    at = MigrationContext.configure(connection).get_current_revision()
    if at is None:
        return release()
    return release()[release().index(at) + 1 :] if at in release() else ()


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


def prepare(engine: Engine, migrate: bool | None) -> None:
    """Upgrades the schema of a database, or checks it. migrate: whether to upgrade; None: only SQLite is upgraded.

    Raises SchemaBehind, or Unavailable if the database cannot be reached.
    """
    with reached(engine) as connection:
        if not lacking(connection):
            return
    if migrate is None:
        migrate = engine.dialect.name == "sqlite"
    if migrate:
        upgrade(engine)
    with reached(engine) as connection:
        check_current(connection)
