"""JSON documents, which are written durably, locks, leftovers, and errors of a full disk."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from shared.durable import TEMPORARY_SUFFIX, write_durably
from shared.errors import MobizoError

Document = TypeVar("Document", bound=BaseModel)

LEFTOVER_SECONDS = 3600.0  # a younger temporary file may still be in use
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_document(path: Path, document: BaseModel) -> None:
    """Replaces the file at `path` by a document as JSON; see `write_durably`."""
    write_durably(path, document.model_dump_json(indent=1).encode())


def read_document(path: Path, model: type[Document], damaged: MobizoError | None = None) -> Document | None:
    """Returns the document in a file; None if the file does not exist.

    damaged: raised if the file cannot be read; None: such a file counts as absent.
    """
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        if damaged is None:
            return None
        raise damaged from error


@contextmanager
def locked(path: Path, held: MobizoError | None = None) -> Iterator[int]:
    """Holds an exclusive lock, which the kernel releases when this process ends, and yields the file's descriptor.

    held: raised if another process holds the lock; None: waits for it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if held is None else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise held or error from error
        yield descriptor
    finally:
        os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Removes the temporary files of killed processes below `directory`: those older than LEFTOVER_SECONDS."""
    for path in directory.rglob(f".*{TEMPORARY_SUFFIX}"):
        if path.is_file() and time.time() - path.stat().st_mtime > LEFTOVER_SECONDS:
            path.unlink(missing_ok=True)


def describe_error(error: MobizoError | OSError) -> str:
    """Returns one line that describes an error, with a remedy for a full disk."""
    if isinstance(error, MobizoError):
        return error.detail
    file_note = f" ({error.filename})" if error.filename else ""
    if error.errno in _DISK_FULL:
        return f"the disk is full{file_note}; free some space; the job is then retried and completed steps are kept"
    return f"{type(error).__name__}: {error}"
