"""The port to stored files, addressed by their sha256. Knows neither where they lie, nor who may read them.

What every store does:

- A file is whole or absent, and never changes its content under its name.
- Writes are checked: `adopt` hashes what it is given, and what is stored is named by its own hash.
- Whole reads are checked: `read` raises, and a `stream` of a whole file breaks off before its last piece, if the bytes
  do not have that hash. `opened` gives a whole file only where that check has passed and the file is as it was then. A
  part of a file cannot be checked by itself: who joins parts checks the whole, as the agent's and the client's
  downloads do.
- Storing what is stored already makes it young again, so that the collector (`server.artifacts.collection`) leaves it.

A workspace is scratch on this machine's own disk, whatever the store.
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
    """A file of a store: bytes, and when it was last stored, also if it lay there already."""

    sha256: str
    size: int
    stored_at: datetime


class ArtifactStore(ABC):
    """The files of one server. Every method may raise Unavailable where the store does not answer."""

    def __init__(self, scratch: Path) -> None:
        """scratch: directory of the workspaces, made here."""
        self._scratch = scratch
        scratch.mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes) -> str:
        """Stores bytes and returns their sha256. Raises StorageFull, with nothing stored."""
        sha256 = sha256_hex(data)
        self._write(data, sha256)
        return sha256

    def adopt(self, path: Path, sha256: str) -> None:
        """Takes over a file of a workspace, never whole in memory; `path` is gone afterwards.

        Raises Untrusted if its content does not have that sha256, StorageFull with nothing stored.
        """
        if file_sha256(path) != sha256:
            raise Untrusted(f"{path.name} does not have the sha256 that was stated for it")
        self._take(path, sha256)
        path.unlink(missing_ok=True)

    def read(self, sha256: str) -> bytes:
        """A whole file, its hash checked. Raises NotFound, or Damaged."""
        data = self._whole(sha256)
        if sha256_hex(data) != sha256:
            raise _damaged(sha256)
        return data

    def open(self, sha256: str) -> BinaryIO:
        """A whole file to read and seek in, at its first byte; its hash is not checked. Raises NotFound."""
        return io.BytesIO(self._whole(sha256))

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes `start` to `end` (exclusive) of a file of at least `end` bytes, in pieces.

        Raises Damaged before the last piece if `start` is 0, these are all bytes there are, and their hash is another.
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
        """A file for the system to send bytes `start` to `end` of by itself; None: `stream` it.

        None where no such file is on this machine, or where the bytes should be checked on their way. Raises NotFound.
        """
        return None

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """A fresh directory whose files can be adopted; removed at the end, with what was not."""
        path = self._scratch / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def workspaces(self) -> list[str]:
        """Names of the workspaces there are, also those that a killed process left."""
        return sorted(path.name for path in self._scratch.iterdir() if path.is_dir())

    def remove_workspace(self, name: str) -> None:
        """Removes a workspace that a killed process left."""
        shutil.rmtree(self._scratch / name, ignore_errors=True)

    def check_writable(self) -> None:
        """Raises Unavailable unless a file can be written, in the store and in the workspaces' directory."""
        try:
            with tempfile.TemporaryFile(dir=self._scratch) as file:
                file.write(b"\0")
        except OSError as error:
            raise Unavailable(f"the files' directory cannot be written ({error.strerror})") from error

    @abstractmethod
    def size(self, sha256: str) -> int:
        """Bytes of a file. Raises NotFound."""

    @abstractmethod
    def stored_at(self, sha256: str) -> datetime | None:
        """When a file was last stored; None if it is absent."""

    @abstractmethod
    def listing(self) -> Iterator[StoredFile]:
        """Every file, in any order; one that comes or goes meanwhile may be missing."""

    @abstractmethod
    def delete(self, sha256s: Sequence[str]) -> None:
        """Removes files; one that is absent is no error."""

    @abstractmethod
    def leftovers(self, before: datetime) -> list[str]:
        """What writers that were killed left half-written before that time, under names for `discard` alone."""

    @abstractmethod
    def discard(self, leftover: str) -> None:
        """Removes a leftover."""

    @abstractmethod
    def _write(self, data: bytes, sha256: str) -> None:
        """Stores bytes under their hash, or makes what is there young again."""

    @abstractmethod
    def _take(self, path: Path, sha256: str) -> None:
        """Stores a file under its hash, or makes what is there young again; `path` may be gone afterwards."""

    @abstractmethod
    def _whole(self, sha256: str) -> bytes:
        """The bytes under a name. Raises NotFound."""

    @abstractmethod
    def _pieces(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes `start` to `end` under a name, as they lie there. Raises NotFound."""


def _damaged(sha256: str) -> Damaged:
    return Damaged(f"the stored file {sha256} is damaged; restore it from a backup")
