"""Where a backup lies: a directory, or one .tar file. Parts are named by relative paths. Knows no part's meaning.

What is written is whole under its name or absent: it grows under another name beside it.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from shared.errors import BadRequest, Conflict

PRIVATE = 0o077  # what a backup is not to have: it holds tokens' digests, users' adapters, and maybe keys


class Writer(Protocol):
    """Takes parts."""

    def add(self, name: str, path: Path) -> None:
        """Takes over a file; `path` may be gone afterwards."""


class Reader(Protocol):
    """Gives parts."""

    def open(self, name: str) -> IO[bytes]:
        """A part's content. Raises BadRequest if it is not there."""


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
            found = self._archive.extractfile(name)
        except (KeyError, tarfile.TarError, OSError) as error:
            raise BadRequest(f"the backup lacks {name}") from error
        if found is None:
            raise BadRequest(f"the backup's {name} is no file")
        return found


@contextmanager
def writing(target: Path) -> Iterator[tuple[Writer, Path]]:
    """A new backup at `target`, a .tar by its name, and a scratch directory beside it. Raises Conflict if it exists."""
    if target.exists():
        raise Conflict(f"{target} exists already; name another place")
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
        _sync(partial, *partial.rglob("*"))
        partial.rename(target)
        _sync(target.parent)
    except FileExistsError as error:
        raise Conflict(f"{error.filename} is there: another backup runs, or was broken off; remove it then") from error
    except BaseException:
        _remove(partial)
        raise
    finally:
        _remove(scratch)
        os.umask(before)


@contextmanager
def reading(source: Path) -> Iterator[Reader]:
    """The parts of a backup. Raises BadRequest if there is none."""
    if source.is_dir():
        yield _Directory(source)
        return
    try:
        archive = tarfile.open(source, "r:")  # noqa: SIM115  # closed below; its errors are told apart from the body's
    except (OSError, tarfile.TarError) as error:
        raise BadRequest(f"{source} is neither a backup's directory nor its .tar file") from error
    with archive:
        yield _Tar(archive)


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
