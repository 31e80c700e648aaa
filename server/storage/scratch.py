"""Scratch directories that are removed even if the process that used them was killed.

A directory is locked while it is used, and its lock ends with the process, so unlocked directories are abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def scratch(parent: Path, prefix: str) -> Iterator[Path]:
    """Creates a directory in `parent` whose name begins with `prefix`, and removes abandoned ones of that prefix."""
    with _parent_locked(parent):
        _remove_abandoned(parent, prefix)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _locked(path, wait=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """Removes every abandoned directory in `parent`."""
    with _parent_locked(parent):
        _remove_abandoned(parent, "")


@contextmanager
def _parent_locked(parent: Path) -> Iterator[None]:
    """Locks `parent` meanwhile, because a new directory in it that is not locked yet would look abandoned."""
    lock = _locked(parent, wait=True)
    try:
        yield
    finally:
        os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    for abandoned in parent.glob(f"{prefix}*"):
        with suppress(OSError):  # a file, or a directory that is used
            os.close(_locked(abandoned, wait=False))
            shutil.rmtree(abandoned, ignore_errors=True)


def _locked(directory: Path, *, wait: bool) -> int:
    """Locks a directory and returns the descriptor, which child processes do not inherit. Raises OSError if locked."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
