"""The container of a backup: a directory or a .tar file, with parts named by relative paths.

A backup is written under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from server.storage.directory import sync
from shared.errors import BadRequest, Conflict

PRIVATE = 0o077  # permissions that are removed: a backup contains token digests, users' adapters, and possibly keys


class Writer(Protocol):
    """Writes the parts of a backup."""

    def add(self, name: str, path: Path) -> None:
        """Adds a file as a part. `path` may be moved."""


class Reader(Protocol):
    """Reads the parts of a backup."""

    def open(self, name: str) -> IO[bytes]:
        """Opens a part. Raises BadRequest if it is missing."""


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    def add(self, name: str, path: Path) -> None:
        target = self._root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, target)
        target.chmod(0o600)

    def open(self, name: str) -> IO[bytes]:
        try:
            return (self._root / name).open("rb")
        except OSError as error:
            raise BadRequest(f"the backup lacks {name}") from error


class _Tar:
    def __init__(self, archive: tarfile.TarFile) -> None:
        self._archive = archive

    def add(self, name: str, path: Path) -> None:
        path.chmod(0o600)
        self._archive.add(path, name)
        path.unlink()

    def open(self, name: str) -> IO[bytes]:
        try:
            part = self._archive.extractfile(name)
        except (KeyError, tarfile.TarError, OSError) as error:
            raise BadRequest(f"the backup lacks {name}") from error
        if part is None:
            raise BadRequest(f"the backup's {name} is not a file")
        return part


@contextmanager
def writing(target: Path) -> Iterator[tuple[Writer, Path]]:
    """Creates a backup at `target`, a .tar file or a directory, and a scratch directory next to it. Raises Conflict."""
    if target.exists():
        raise Conflict(f"{target} already exists; choose another path")
    partial, scratch = (target.with_name(f".{target.name}.{word}") for word in ("partial", "scratch"))
    before = os.umask(PRIVATE)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch.mkdir()
        if target.suffix == ".tar":
            with tarfile.open(partial, "x") as archive:
                yield _Tar(archive), scratch
        else:
            partial.mkdir()
            yield _Directory(partial), scratch
        for path in (partial, *partial.rglob("*")):
            sync(path)
        partial.rename(target)
        sync(target.parent)
    except FileExistsError as error:
        raise Conflict(
            f"{error.filename} exists: another backup is running or was interrupted; if interrupted, remove it"
        ) from error
    except BaseException:
        _remove(partial)
        raise
    finally:
        _remove(scratch)
        os.umask(before)


@contextmanager
def reading(source: Path) -> Iterator[Reader]:
    """Opens a backup for reading. Raises BadRequest if there is none."""
    if source.is_dir():
        yield _Directory(source)
        return
    try:
        archive = tarfile.open(source, "r:")  # noqa: SIM115  # closed below; separates its errors from those of the body
    except (OSError, tarfile.TarError) as error:
        raise BadRequest(f"{source} is neither a backup's directory nor its .tar file") from error
    with archive:
        yield _Tar(archive)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
