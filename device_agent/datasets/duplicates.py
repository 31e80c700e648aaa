"""Remembers which records were seen, in bounded memory: their digests lie in a temporary SQLite file."""

from __future__ import annotations

import sqlite3
from pathlib import Path

CACHE_KIB = 32 << 10  # of the file


class SeenDigests:
    """A set of digests in the file at `path`, or in SQLite's own temporary file."""

    def __init__(self, path: Path | None) -> None:
        """Creates the file, which `close` removes. Raises OSError."""
        self._path = path
        if path is not None:
            path.touch(0o600)
        try:
            self._database = sqlite3.connect("" if path is None else path, isolation_level=None)
            for setting in ("journal_mode = OFF", "synchronous = OFF", f"cache_size = -{CACHE_KIB}"):
                self._database.execute(f"PRAGMA {setting}")
            self._database.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")
            self._database.execute("BEGIN")
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error

    def add(self, digest: bytes) -> bool:
        """Adds a digest; returns whether it is new. Raises OSError, such as for a full disk."""
        try:
            return self._database.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1
        except sqlite3.OperationalError as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        """Removes the file."""
        self._database.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
