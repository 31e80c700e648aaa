"""The interface of stores, which hold files by their sha256. All stores behave as follows.

- A file is complete or absent, and its content never changes.
- Writes are checked: `adopt` verifies the hash of its file, and files are named by their own hash.
- Reads of complete files are checked: if the hash differs, `read` raises, and `stream` raises before its last piece.
  `opened` returns a complete file only if it was verified before and has not changed since. A part of a file cannot be
  checked alone: the agent's and the client's downloads check the file after joining its parts.
- Storing a file again updates its time, so that garbage collection (`server.storage.garbage_collection`) keeps it.

A workspace is a scratch directory on the local disk, whatever the store.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from shared.canonical import file_sha256, sha256_hex
from shared.errors import Unavailable, Untrusted


class Damaged(Unavailable):
    """A stored file is damaged; restore it from a backup."""

    code, title = "damaged-file", "Damaged file"


class StorageFull(Unavailable):
    """The server's disk is full; nothing was stored, try again later."""

    code, title = "storage-full", "Storage full"


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: its size in bytes, and when it was last stored."""

    sha256: str
    size: int
    stored_at: datetime


class ArtifactStore(ABC):
    """The files of one server. Every method may raise Unavailable if the store does not answer."""

    def __init__(self, scratch: Path) -> None:
        """scratch: directory of the workspaces, which is created."""
        self._scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Stores bytes and returns their sha256. Raises StorageFull, with nothing stored."""
        sha256 = sha256_hex(data)
        self._write(data, sha256)
        return sha256

    def adopt(self, path: Path, sha256: str) -> None:
        """Moves a file of a workspace into the store, without reading all of it into memory; removes `path`.

        Raises Untrusted if its content has another sha256, or StorageFull, and stores nothing.
        """
        if file_sha256(path) != sha256:
            raise Untrusted(f"{path.name} does not have the sha256 that was stated for it")
        self._take(path, sha256)
        path.unlink(missing_ok=True)

    def read(self, sha256: str) -> bytes:
        """Returns a file after checking its hash. Raises NotFound or Damaged."""
        data = self._whole(sha256)
        if sha256_hex(data) != sha256:
            raise _damaged(sha256)
        return data

    def open(self, sha256: str) -> BinaryIO:
        """Opens a file for reading and seeking; its hash is not checked. Raises NotFound."""
        return io.BytesIO(self._whole(sha256))

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yields bytes `start` to `end` (exclusive) of a file of at least `end` bytes, in pieces.

        Raises Damaged before the last piece if the range is the complete file and its hash differs.
        """
        if start == end:
            return
        whole = start == 0 and end == self.size(sha256)
        digest, at = hashlib.sha256(), start
        async for piece in self._pieces(sha256, start, end):
            at += len(piece)
            if whole:
                digest.update(piece)
                if at >= end and digest.hexdigest() != sha256:
                    raise _damaged(sha256)
            yield piece
        if at != end:
            raise _damaged(sha256)

    def opened(self, sha256: str, start: int, end: int) -> BinaryIO | None:
        """Opens a file whose bytes `start` to `end` the operating system can send directly; None: use `stream`.

        None if the file is not on this machine, or its bytes must be checked while they are sent. Raises NotFound.
        """
        return None

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """Creates an empty directory whose files can be adopted; it is removed at the end with all other files."""
        path = self._scratch / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def workspaces(self) -> list[str]:
        """Returns the names of all workspaces, including those of killed processes."""
        return sorted(path.name for path in self._scratch.iterdir() if path.is_dir())

    def remove_workspace(self, name: str) -> None:
        """Removes the workspace of a killed process."""
        shutil.rmtree(self._scratch / name, ignore_errors=True)

    def check_writable(self) -> None:
        """Raises Unavailable unless files can be written to the store and to the scratch directory."""
        try:
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                file.write(b"\0")
        except OSError as error:
            raise Unavailable(f"the files' directory cannot be written ({error.strerror})") from error

    @abstractmethod
    def size(self, sha256: str) -> int:
        """Returns the size of a file, bytes. Raises NotFound."""

    @abstractmethod
    def stored_at(self, sha256: str) -> datetime | None:
        """Returns when a file was last stored; None if it is absent."""

    @abstractmethod
    def listing(self) -> Iterator[StoredFile]:
        """Yields every file, in any order; files that are added or removed meanwhile may be missing."""

    @abstractmethod
    def delete(self, sha256s: Sequence[str]) -> None:
        """Removes files; absent files are ignored."""

    @abstractmethod
    def leftovers(self, before: datetime) -> list[str]:
        """Returns names, for `discard`, of incomplete files that killed writers left before a time."""

    @abstractmethod
    def discard(self, leftover: str) -> None:
        """Removes a leftover."""

    @abstractmethod
    def _write(self, data: bytes, sha256: str) -> None:
        """Stores bytes under their hash, or updates the time of the stored file."""

    @abstractmethod
    def _take(self, path: Path, sha256: str) -> None:
        """Stores a file under its hash, or updates the time of the stored file; may remove `path`."""

    @abstractmethod
    def _whole(self, sha256: str) -> bytes:
        """Returns the bytes of a file. Raises NotFound."""

    @abstractmethod
    def _pieces(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Yields bytes `start` to `end` of a file, unchecked. Raises NotFound."""


def _damaged(sha256: str) -> Damaged:
    return Damaged(f"the stored file {sha256} is damaged; restore it from a backup")
