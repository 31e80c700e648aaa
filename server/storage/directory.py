"""Files in a local directory: `objects/ab/abcd...`, and `staging` for workspaces.

A file is written and synced in a workspace under `staging`, then linked to its name. Its modification time is when it
was last stored.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from server.storage.store import ArtifactStore, StoredFile, full_disk_refused
from shared.durable import sync
from shared.errors import NotFound

PIECE_BYTES = 256 << 10
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


class DiskArtifacts(ArtifactStore):
    """A local directory."""

    def __init__(self, root: Path) -> None:
        """root: parent of `objects` and `staging`, which are created."""
        self._objects = root / "objects"
        self._staging = root / "staging"
        super().__init__(self._staging)
        self._objects.mkdir(exist_ok=True)

    @staticmethod
    def name(sha256: str) -> str:
        """Returns the path of a file under `objects`."""
        return f"{sha256[:2]}/{sha256}"

    def _path(self, sha256: str) -> Path:
        return self._objects / self.name(sha256)

    def size(self, sha256: str) -> int:
        """Returns the size of a file, bytes. Raises NotFound."""
        try:
            return self._path(sha256).stat().st_size
        except FileNotFoundError as error:
            raise NotFound from error

    def stored_at(self, sha256: str) -> datetime | None:
        """Returns the modification time of a file; None if it is absent."""
        try:
            return _moment(self._path(sha256).stat().st_mtime)
        except FileNotFoundError:
            return None

    def listing(self) -> Iterator[StoredFile]:
        """Yields every file; anything that the store did not write is skipped."""
        for directory in sorted(path for path in self._objects.iterdir() if path.is_dir()):
            with os.scandir(directory) as entries:
                for entry in entries:
                    if not _SHA256.fullmatch(entry.name) or not entry.name.startswith(directory.name):
                        continue
                    try:
                        stat = entry.stat()
                    except FileNotFoundError:
                        continue
                    yield StoredFile(entry.name, stat.st_size, _moment(stat.st_mtime))

    def delete(self, sha256s: Sequence[str]) -> None:
        """Removes files."""
        for sha256 in sha256s:
            self._path(sha256).unlink(missing_ok=True)

    def _write(self, data: bytes, sha256: str) -> None:
        with full_disk_refused(), self.workspace("put") as workspace:
            staged = workspace / "file"
            staged.write_bytes(data)
            self._link(staged, sha256)

    def _take(self, path: Path, sha256: str) -> None:
        with full_disk_refused():
            self._link(path, sha256)

    def _link(self, staged: Path, sha256: str) -> None:
        target = self._path(sha256)
        target.parent.mkdir(exist_ok=True)
        sync(staged)
        os.utime(staged)
        staged.chmod(0o440)
        while True:
            try:
                os.link(staged, target)
                break
            except FileExistsError:
                if self._renew(target, staged.stat().st_size):
                    return
        sync(target.parent)
        sync(self._objects)

    @staticmethod
    def _renew(target: Path, size: int) -> bool:
        """Updates the time of a file. Returns False if it is absent or has another size."""
        try:
            if target.stat().st_size == size:
                os.utime(target)
                return True
            target.unlink()
        except FileNotFoundError:
            pass
        return False

    def open(self, sha256: str) -> BinaryIO:
        """Opens a file for reading and seeking, without reading it into memory. Raises NotFound."""
        try:
            return self._path(sha256).open("rb", buffering=0)
        except FileNotFoundError as error:
            raise NotFound(f"the file {sha256} is not stored") from error

    def _whole(self, sha256: str) -> bytes:
        try:
            return self._path(sha256).read_bytes()
        except FileNotFoundError as error:
            raise NotFound from error

    async def _pieces(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        try:
            descriptor = os.open(self._path(sha256), os.O_RDONLY)
        except FileNotFoundError as error:
            raise NotFound from error
        try:
            buffer = memoryview(bytearray(min(PIECE_BYTES, end - start)))
            while start < end:
                piece = _cached(descriptor, buffer[: end - start], start)
                if piece is None:
                    piece = await asyncio.to_thread(os.pread, descriptor, min(PIECE_BYTES, end - start), start)
                if not piece:
                    return
                start += len(piece)
                yield piece
        finally:
            os.close(descriptor)


def _cached(descriptor: int, buffer: memoryview, offset: int) -> bytes | None:
    """Reads bytes from the page cache, at least one; None if that would wait for the disk, or is not supported.

    Most downloads are of a few popular files, which are thus served without a thread.
    """
    try:
        count = os.preadv(descriptor, [buffer], offset, os.RWF_NOWAIT)
    except OSError:
        return None
    return bytes(buffer[:count]) if count else None
