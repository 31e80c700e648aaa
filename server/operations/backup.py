"""Copies a home with SQLite to a backup while servers and workers run. A backup is a home itself.

The database is copied first, then the files that the copy references. Files are stored before a row references them,
and garbage collection keeps them for a grace period after the last reference, so every reference in the copy resolves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from sqlalchemy import make_url, select
from sqlalchemy.orm import Session

from server.database.database import Database
from server.settings import Settings
from server.storage.directory import DiskArtifacts
from server.storage.opening import open_artifacts
from server.storage.store import REFERENCES, ArtifactStore
from shared.durable import sync
from shared.errors import BadRequest, Conflict, NotFound, Unavailable

PRIVATE = 0o077  # permissions that are removed: a backup contains token digests, users' adapters, and possibly keys


def back_up(settings: Settings, target: Path, with_keys: bool) -> int:
    """Writes a backup to the directory `target`, under a temporary name until it is complete. Returns its files.

    Raises BadRequest unless the database is SQLite, Conflict if `target` exists, and Unavailable if a file or the
    database is damaged.
    """
    url = make_url(settings.url)
    if url.get_backend_name() != "sqlite":
        raise BadRequest("back up PostgreSQL by pg_dump, and then the files; docs/operations.md has the commands")
    if target.exists():
        raise Conflict(f"{target} already exists; choose another path")
    partial = target.with_name(f".{target.name}.partial")
    before = os.umask(PRIVATE)
    try:
        partial.mkdir(parents=True)
        copy = settings.model_copy(update={"home": partial, "database_url": None})
        _copy_database(Path(url.database or ""), partial / "mobizo.sqlite3")
        files = _copy_files(open_artifacts(settings), copy)
        if with_keys:
            shutil.copytree(settings.key_path.parent, copy.key_path.parent)
        for path in (partial, *partial.rglob("*")):
            sync(path)
        partial.rename(target)
        sync(target.parent)
    except FileExistsError as error:
        raise Conflict(
            f"{error.filename} exists: another backup is running or was interrupted; if interrupted, remove it"
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.umask(before)
    return files


def _copy_database(source: Path, target: Path) -> None:
    with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
        result = new.execute("PRAGMA integrity_check").fetchone()[0]
        new.execute("PRAGMA journal_mode = DELETE")  # so that the copy is one file
    if result != "ok":
        raise Unavailable(f"the database is damaged ({result}); restore an earlier backup")


def _copy_files(artifacts: ArtifactStore, copy: Settings) -> int:
    database, store = Database(copy.url), DiskArtifacts(copy.artifacts_path)
    with closing(database), database.reading() as session:
        required, optional = named_files(session), named_files(session, temporary=True)
    copied = 0
    with store.workspace("backup") as workspace:
        for sha256 in sorted(required | optional):
            try:
                asyncio.run(_fetch(artifacts, sha256, workspace / sha256))
            except NotFound as error:
                if sha256 in required:
                    raise Unavailable(f"the file {sha256}, which the database references, is missing") from error
            else:
                store.adopt(workspace / sha256, sha256)
                copied += 1
    return copied


async def _fetch(artifacts: ArtifactStore, sha256: str, path: Path) -> None:
    size = artifacts.size(sha256)
    with path.open("wb") as file:
        async for piece in artifacts.stream(sha256, 0, size):
            file.write(piece)


def named_files(session: Session, *, temporary: bool = False) -> set[str]:
    """Returns the sha256 of every file that the database references.

    temporary: of uploads for leases instead, whose files may be missing once the lease has ended.
    """
    columns = [each for each in REFERENCES.get() if each.temporary is temporary]
    sha256s: set[str | None] = set()
    for each in columns:
        rows = () if temporary else (each.rows,)
        sha256s |= set(session.scalars(select(each.column).where(*rows).distinct()))
    return {sha256 for sha256 in sha256s if sha256 is not None}
