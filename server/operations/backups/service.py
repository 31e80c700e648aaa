"""Creates a backup while servers and workers run, and restores one into an empty home.

The database is copied first, then the files that the copy references. Files are stored before a row references them,
and garbage collection keeps them for a grace period after the last reference, so every reference in the copy resolves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import IO

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from server.database.columns import utc_now
from server.database.database import Database
from server.database.schema import lacking, release
from server.operations.backups.container import Reader, Writer, reading, writing
from server.operations.backups.manifest import KEYS, MANIFEST, OBJECTS, BackedUpFile, BackupManifest
from server.operations.backups.snapshot import POSTGRESQL, SQLITE, check_empty, restore_postgres, take_snapshot
from server.settings import Settings
from server.storage.opening import open_artifacts
from server.storage.store import REFERENCES, ArtifactStore, FileColumn
from shared.canonical import file_sha256
from shared.errors import BadRequest, Conflict, NotFound, Unavailable, Untrusted

_RESTORING = ".restoring"


def back_up(settings: Settings, target: Path, with_keys: bool) -> BackupManifest:
    """Writes a backup to `target`, a directory or a .tar file.

    Raises Conflict if it exists, NoPostgresTools, or Unavailable if a file is damaged or the database is unavailable.
    """
    database = Database(settings.url, settings.tuning)
    artifacts = open_artifacts(settings)
    try:
        with writing(target) as (writer, scratch):
            with take_snapshot(database, settings.url, scratch) as snapshot:
                missing = lacking(snapshot.session.connection())
                named_sha256s, uploaded = named_files(snapshot.session), uploaded_files(snapshot.session)
            manifest = BackupManifest(
                made_at=utc_now(),
                version=version("mobizo"),
                revision=release()[-1 - len(missing)],
                database=SQLITE if snapshot.path.name == SQLITE else POSTGRESQL,
                database_sha256=file_sha256(snapshot.path),
                files=tuple(_copy_files(artifacts, named_sha256s, uploaded, writer, scratch)),
                keys=tuple(_copy_keys(settings, writer, scratch)) if with_keys else (),
            )
            writer.add(manifest.database, snapshot.path)
            path = scratch / MANIFEST
            path.write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
            writer.add(MANIFEST, path)
    finally:
        database.close()
    return manifest


def _copy_files(
    artifacts: ArtifactStore, named_sha256s: frozenset[str], uploaded: frozenset[str], writer: Writer, scratch: Path
) -> Iterator[BackedUpFile]:
    for sha256 in sorted(named_sha256s | uploaded):
        path = scratch / sha256
        try:
            size = artifacts.size(sha256)
            asyncio.run(_fetch(artifacts, sha256, size, path))
        except NotFound as error:
            if sha256 not in named_sha256s:
                continue
            raise Unavailable(
                f"the stored file {sha256}, which the database references, is missing; try again"
            ) from error
        writer.add(f"{OBJECTS}/{sha256}", path)
        yield BackedUpFile(sha256=sha256, size=size)


async def _fetch(artifacts: ArtifactStore, sha256: str, size: int, path: Path) -> None:
    with path.open("wb") as file:
        async for piece in artifacts.stream(sha256, 0, size):
            file.write(piece)


def _copy_keys(settings: Settings, writer: Writer, scratch: Path) -> Iterator[str]:
    directory = settings.key_path.parent
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = path.relative_to(directory).as_posix()
            copy = scratch / "key"
            shutil.copyfile(path, copy)
            writer.add(f"{KEYS}/{name}", copy)
            yield name


def restore(settings: Settings, source: Path) -> BackupManifest:
    """Restores a backup into an empty home, its database and its store. Every part is verified by its sha256.

    Raises Conflict if the home or the database is not empty, BadRequest for an invalid backup, one of another kind of
    database or of a later release, and Untrusted for a modified part. The home stays empty after an error.
    """
    home = settings.home
    if home.exists() and [path for path in home.iterdir() if path.name != _RESTORING]:
        raise Conflict(f"{home} is not empty; restore into another home (MOBIZO_HOME)")
    partial = home / _RESTORING
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700, parents=True)
    home.chmod(0o700)
    try:
        with reading(source) as reader:
            manifest = _manifest(reader)
            _restore_into(settings, reader, manifest, partial)
        # The database last: a home without it is not set up.
        for path in sorted(partial.iterdir(), key=lambda path: path.name == SQLITE):
            path.rename(home / path.name)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _manifest(reader: Reader) -> BackupManifest:
    with reader.open(MANIFEST) as file:
        try:
            manifest = BackupManifest.model_validate_json(file.read())
        except ValidationError as error:
            raise BadRequest(f"{MANIFEST} does not have a format that this release supports") from error
    if manifest.revision not in release():
        raise BadRequest(
            f"the backup was created by the later release mobizo {manifest.version}; restore it with that release"
        )
    for name in manifest.keys:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BadRequest(f"the backup has a key with an invalid path: {name!r}")
    return manifest


def _restore_into(settings: Settings, reader: Reader, manifest: BackupManifest, partial: Path) -> None:
    sqlite = settings.database_url is None
    if sqlite != (manifest.database == SQLITE):
        kind = "SQLite in the home: unset MOBIZO_DATABASE_URL" if not sqlite else "PostgreSQL: set MOBIZO_DATABASE_URL"
        raise BadRequest(f"the backup's database is {kind}")
    database = Database(settings.url if not sqlite else f"sqlite:///{partial / 'none'}")
    try:
        if not sqlite:
            check_empty(database.engine)
        copy = partial / manifest.database
        _take(reader, manifest.database, copy)
        if file_sha256(copy) != manifest.database_sha256:
            raise Untrusted("the database in the backup was modified")
        artifacts = open_artifacts(settings.model_copy(update={"home": partial}))
        with artifacts.workspace("restore") as workspace:
            for file in manifest.files:
                path = workspace / file.sha256
                _take(reader, f"{OBJECTS}/{file.sha256}", path)
                artifacts.adopt(path, file.sha256)
        for name in manifest.keys:
            path = partial / KEYS / name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _take(reader, f"{KEYS}/{name}", path)
        if not sqlite:
            restore_postgres(settings.url, copy)
            copy.unlink()
    finally:
        database.close()


def _take(reader: Reader, name: str, path: Path) -> None:
    with reader.open(name) as source, _private(path) as target:
        shutil.copyfileobj(source, target)
        target.flush()
        os.fsync(target.fileno())


def _private(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _columns(*, temporary: bool) -> list[FileColumn]:
    return [each for feature in REFERENCES.get() for each in feature.columns if each.temporary is temporary]


def named_files(session: Session) -> frozenset[str]:
    """Returns the sha256 of every file that the backup must contain."""
    sha256s: set[str] = set()
    for each in _columns(temporary=False):
        sha256s |= set(session.scalars(select(each.column).where(each.rows, each.column.is_not(None)).distinct()))
    return frozenset(sha256s)


def uploaded_files(session: Session) -> frozenset[str]:
    """Returns the sha256 of uploads for leases that are not completed. The file of an ended lease may be missing."""
    columns = [each.column for each in _columns(temporary=True)]
    digests = [session.scalars(select(column).where(column.is_not(None)).distinct()) for column in columns]
    return frozenset(sha256 for few in digests for sha256 in few if sha256 is not None)
