"""Atomic, durable file writes, and errors of a full disk.

After a power cut a file is either complete or absent.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from device_agent.errors import DoesNotFit

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the file at `path` by `data`: writes a temporary file, syncs it, renames it and syncs the directory."""
    write_pieces(path, (data,), mode)


def write_pieces(path: Path, pieces: Iterable[bytes], mode: int = 0o600) -> None:
    """Replaces the file at `path` by the concatenated pieces; see `write_durably`."""
    temporary = path.with_name(path.name + ".new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Syncs a directory, so that renames in it survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def disk_full_as_does_not_fit() -> Iterator[None]:
    """Turns the OSError of a full disk into DoesNotFit, after which the run resumes from its journal."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise DoesNotFit("the disk is full; free some space and the run resumes where it stopped") from error


def describe_os_error(error: OSError) -> str:
    """Returns one line that describes an OSError, with a remedy for a full disk."""
    file_note = f" ({error.filename})" if error.filename else ""
    if error.errno in _DISK_FULL:
        return f"the disk is full{file_note}; free some space; the job is then retried and completed steps are kept"
    return f"{type(error).__name__}: {error}"
