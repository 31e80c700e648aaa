"""Files that are whole or absent, whatever moment the power goes. Knows nothing of what they hold."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the file at `path` by `data`: written aside, synced, renamed, and the rename synced."""
    write_pieces(path, (data,), mode)


def write_pieces(path: Path, pieces: Iterable[bytes], mode: int = 0o600) -> None:
    """As `write_durably`, of a file that comes in pieces."""
    aside = path.with_name(path.name + ".new")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
