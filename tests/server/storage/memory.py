"""A store in the memory of this process, for tests."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from pathlib import Path

from server.database.columns import utc_now
from server.storage.store import ArtifactStore, StoredFile
from shared.errors import NotFound

PIECE_BYTES = 128 << 10


class MemoryArtifacts(ArtifactStore):
    """A thread-safe store in a dictionary."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._files: dict[str, tuple[bytes, datetime]] = {}
        self._lock = threading.Lock()

    def size(self, sha256: str) -> int:
        """Returns the size of a file, bytes. Raises NotFound."""
        return len(self._whole(sha256))

    def stored_at(self, sha256: str) -> datetime | None:
        """Returns when a file was last stored; None if it is absent."""
        file = self._files.get(sha256)
        return file[1] if file else None

    def listing(self) -> Iterator[StoredFile]:
        """Yields every file."""
        with self._lock:
            files = list(self._files.items())
        return iter([StoredFile(sha256, len(data), stored_at) for sha256, (data, stored_at) in files])

    def delete(self, sha256s: Sequence[str]) -> None:
        """Removes files."""
        with self._lock:
            for sha256 in sha256s:
                self._files.pop(sha256, None)

    def leftovers(self, before: datetime) -> list[str]:
        """Returns an empty list, because writes are atomic."""
        return []

    def discard(self, leftover: str) -> None:
        """Does nothing, because there are no leftovers."""

    def _write(self, data: bytes, sha256: str) -> None:
        with self._lock:
            self._files[sha256] = (data, utc_now())

    def _take(self, path: Path, sha256: str) -> None:
        self._write(path.read_bytes(), sha256)

    def _whole(self, sha256: str) -> bytes:
        file = self._files.get(sha256)
        if file is None:
            raise NotFound
        return file[0]

    async def _pieces(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        data = self._whole(sha256)[start:end]
        for at in range(0, len(data), PIECE_BYTES):
            yield data[at : at + PIECE_BYTES]
