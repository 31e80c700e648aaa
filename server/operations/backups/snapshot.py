"""Copies a database consistently while it is in use, and restores the copy into an empty database.

SQLite is copied by its online backup. PostgreSQL is dumped by `pg_dump`, in the same snapshot in which the file
references are read.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import URL, Engine, inspect, make_url, text
from sqlalchemy.orm import Session

from server.database.database import Database
from shared.errors import Conflict, Unavailable

SQLITE, POSTGRESQL = "mobizo.sqlite3", "mobizo.pgdump"


class NoPostgresTools(Unavailable):
    """PostgreSQL's client programs are not on PATH."""

    code, title = "no-postgresql-tools", "No PostgreSQL tools"


@dataclass(frozen=True)
class Snapshot:
    """A copied database, and a session on the same snapshot."""

    path: Path
    session: Session


@contextmanager
def take_snapshot(database: Database, url: str, directory: Path) -> Iterator[Snapshot]:
    """Takes a snapshot into `directory`. Raises NoPostgresTools, or Unavailable if the copy fails."""
    if database.engine.dialect.name == "sqlite":
        path = directory / SQLITE
        copy_sqlite(Path(make_url(url).database or ""), path)
        copied = Database(f"sqlite:///{path}")
        try:
            with copied.reading() as session:
                yield Snapshot(path, session)
        finally:
            copied.close()
            _merge_wal(path)
        return
    path = directory / POSTGRESQL
    with database.engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        exported = connection.scalar(text("SELECT pg_export_snapshot()"))
        place = make_url(url)
        options = "--format=custom", "--no-owner", f"--snapshot={exported}", f"--file={path}"
        _postgres("pg_dump", place, *options, f"--dbname={_libpq(place)}")
        with Session(connection) as session:
            yield Snapshot(path, session)


def copy_sqlite(source: Path, target: Path) -> None:
    """Copies a database that may be in use. Raises Unavailable if it is damaged."""
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
        result = new.execute("PRAGMA integrity_check").fetchone()[0]
    if result != "ok":
        raise Unavailable(f"the database is damaged ({result}); restore an earlier backup")
    _merge_wal(target)


def _merge_wal(path: Path) -> None:
    """Merges the write-ahead log, so that the database is one file."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")


def check_empty(engine: Engine) -> None:
    """Raises Conflict if the database has tables."""
    if inspect(engine).get_table_names():
        raise Conflict("the database in MOBIZO_DATABASE_URL is not empty; use a new one, or drop its tables")


def restore_postgres(url: str, dump: Path) -> None:
    """Restores a dump into an empty database. Raises NoPostgresTools, or Unavailable; the database then stays empty."""
    place = make_url(url)
    _postgres(
        "pg_restore",
        place,
        "--no-owner",
        "--exit-on-error",
        "--single-transaction",
        f"--dbname={_libpq(place)}",
        str(dump),
    )


def _libpq(url: URL) -> str:
    # `URL.set` leaves a field unchanged for None.
    place = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    return place.render_as_string()


def _postgres(program: str, url: URL, *arguments: str) -> None:
    executable = shutil.which(program)
    if executable is None:
        raise NoPostgresTools(
            f"{program} is not on PATH; install PostgreSQL's client programs of the server's version or later"
        )
    # The password is passed in the environment, because other users can see the arguments of a process.
    environment = os.environ | ({"PGPASSWORD": str(url.password)} if url.password else {})
    process = subprocess.run([executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        why = (process.stderr.strip().splitlines() or [f"exit code {process.returncode}"])[0]
        raise Unavailable(f"{program} failed ({why})")
