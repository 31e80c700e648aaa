"""Durable writes of files: after a power cut a file is either complete or absent."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_SUFFIX = ".new"


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the file at `path` by `data`: writes a temporary file, syncs it, renames it and syncs the directory."""
    write_pieces(path, (data,), mode)


def write_pieces(path: Path, pieces: Iterable[bytes], mode: int = 0o600, *, synced: bool = True) -> None:
    """Replaces the file at `path` by the concatenated pieces; see `write_durably`.

    synced: False: atomic, but not durable. Several processes may write the same file; the last one to finish wins.
    """
    descriptor, name = tempfile.mkstemp(TEMPORARY_SUFFIX, f".{path.name}.", path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.writelines(pieces)
            if synced:
                file.flush()
                os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
    if synced:
        sync(path.parent)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file of mode 0600 and syncs it when it is complete. Raises FileExistsError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Writes a file, or the entries of a directory, to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
