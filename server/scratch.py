"""Scratch directories beside what they become, removed also after the process that used one was killed.

Each is locked while it is used, and a lock ends with its process: what is not locked is left. Knows not what they hold.
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
    """A fresh directory in `parent` whose name begins with `prefix`; others of that prefix that were left go first."""
    # Alone, since one that was just made and is not locked yet would look left.
    alone = _locked(parent, wait=True)
    try:
        for left in parent.glob(f"{prefix}*"):
            with suppress(OSError):
                os.close(_locked(left, wait=False))
                shutil.rmtree(left, ignore_errors=True)
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = _locked(path, wait=True)
    finally:
        os.close(alone)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _locked(directory: Path, *, wait: bool) -> int:
    """A descriptor that holds the directory's lock; not passed on to child processes. Raises OSError if it is held."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
