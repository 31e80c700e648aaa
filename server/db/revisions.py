"""Whether a database has every migration of this release, and who brings it up. Knows no tables.

A database that is ahead is served: migrations come first, then servers are replaced one after another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from server.db.schema import migrations, upgrade
from shared.errors import Unavailable


class SchemaBehind(Unavailable):
    """The database lacks migrations of this release; run `mobizo-server migrate` once, then start its servers."""

    code, title = "schema-behind", "Database not up to date"


@cache
def release() -> tuple[str, ...]:
    """This release's migrations, first to last."""
    script = ScriptDirectory.from_config(migrations())
    return tuple(revision.revision for revision in script.walk_revisions())[::-1]


def lacking(connection: Connection) -> tuple[str, ...]:
    """The migrations that the database has not, in order."""
    at = MigrationContext.configure(connection).get_current_revision()
    if at is None:
        return release()
    return release()[release().index(at) + 1 :] if at in release() else ()


def check_current(connection: Connection) -> None:
    """Raises SchemaBehind for a database that lacks a migration."""
    if missing := lacking(connection):
        raise SchemaBehind(
            f"the database lacks {len(missing)} migration{'s' * (len(missing) > 1)} of this release; run "
            "`mobizo-server migrate` once, then start its servers"
        )


@contextmanager
def reached(engine: Engine) -> Iterator[Connection]:
    """A connection. Raises Unavailable if the database cannot be reached; its password is not told."""
    try:
        with engine.connect() as connection:
            yield connection
    except OperationalError as error:
        why = str(error.orig).strip().partition("\n")[0]
        raise Unavailable(f"the database cannot be reached ({why}); see MOBIZO_DATABASE_URL") from error


def prepare(engine: Engine, migrate: bool | None) -> None:
    """Brings a database up, or only checks that it is. migrate: None if SQLite alone may be brought up here.

    Raises SchemaBehind, or Unavailable if it cannot be reached.
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
