"""The interface of stores, which hold files by their sha256, and the references to them. All stores behave as follows.

- A file is complete or absent, and its content never changes.
- Writes are checked: `adopt` verifies the hash of its file, and files are named by their own hash.
- Reads of complete files are checked: if the hash differs, `read` raises, and `stream` raises before its last piece.
  A part of a file cannot be checked alone: the agent's and the client's downloads check the file after joining its
  parts.
- Storing a file again updates its time, so that garbage collection (`server.storage.garbage_collection`) keeps it.

A workspace is a scratch directory on the local disk, whatever the store.

Tables reference stored files by their sha256. A transaction that adds a reference calls `hold`, which refuses files
that are being removed (`server.storage.garbage_collection`). So unreferenced files are removed without racing new
references.
"""

from __future__ import annotations

import errno
import hashlib
import io
import mmap
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import BigInteger, ColumnElement, Select, String, select, true, union_all
from sqlalchemy.orm import InstrumentedAttribute, Mapped, Session, mapped_column

from server.database.columns import Table, UtcTime
from server.ports import Port
from server.storage.scratch import remove_abandoned, scratch
from shared.canonical import file_sha256, sha256_hex
from shared.errors import NotFound, Unavailable, Untrusted

ONLY_ROW = 1  # number of the only row
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Damaged(Unavailable, code="damaged-file"):
    """A stored file is damaged; restore it from a backup."""


class StorageFull(Unavailable):
    """The server's disk is full; nothing was stored, try again later."""


@contextmanager
def full_disk_refused() -> Iterator[None]:
    """Raises StorageFull in place of the system's errors about a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StorageFull from error
        raise


class StagingFile:
    """A file on the local disk that is hashed while it is written, and can then be adopted. size: bytes so far."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Returns the sha256 of the bytes so far."""
        return self._digest.hexdigest()

    def view(self) -> memoryview:
        """Returns the content without reading it into memory; valid also after the file was adopted."""
        if not self.size:
            return memoryview(b"")
        with self.path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def write(self, piece: bytes) -> None:
        """Appends bytes. Raises StorageFull."""
        with full_disk_refused(), self.path.open("ab") as file:
            file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)


@dataclass(frozen=True)
class StoredFile:
    """A file of a store: its size in bytes, and when it was last stored."""

    sha256: str
    size: int
    stored_at: datetime


class ArtifactStore(ABC):
    """The files of one server. Every method may raise Unavailable if the store does not answer."""

    def __init__(self, scratch_path: Path) -> None:
        """scratch_path: directory of the workspaces, which is created."""
        self._scratch = scratch_path
        scratch_path.mkdir(parents=True, exist_ok=True)

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

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """Creates an empty directory whose files can be adopted; it is removed at the end with all other files."""
        with scratch(self._scratch, f"{name}-") as path:
            yield path

    def remove_abandoned_workspaces(self) -> None:
        """Removes the workspaces of killed processes, which hold no lock on them any more."""
        remove_abandoned(self._scratch)

    @contextmanager
    def staging_file(self) -> Iterator[StagingFile]:
        """Creates an empty file that can be adopted; it is removed at the end. Raises StorageFull."""
        with ExitStack() as stack:
            with full_disk_refused():
                path = stack.enter_context(self.workspace("staging")) / "file"
                path.touch()
            yield StagingFile(path)

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


@dataclass(frozen=True, eq=False)
class FileColumn:
    """A column of sha256 hashes that reference stored files.

    rows: the rows whose hashes count; `join` has the table and the condition if that depends on another table.
    temporary: garbage collection may remove such a file once its row stops counting, and a backup may lack it.
    """

    column: InstrumentedAttribute[str] | InstrumentedAttribute[str | None]
    rows: ColumnElement[bool] = field(default_factory=true)
    join: tuple[type[Table], ColumnElement[bool]] | None = None
    temporary: bool = False


# The references of all features. Garbage collection and backups fail if this port is not connected.
REFERENCES: Port[tuple[FileColumn, ...]] = Port("storage.references")


class GarbageCollection(Table):
    """The latest pass of garbage collection. The row is inserted with the tables.

    Transactions that reference files lock it in shared mode; a transaction that begins to remove files, exclusively.
    """

    __tablename__ = "collections"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    started_at: Mapped[datetime | None] = mapped_column(UtcTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcTime)
    deleted: Mapped[int] = mapped_column(BigInteger)
    freed_bytes: Mapped[int] = mapped_column(BigInteger)


THE_ROW = GarbageCollection.number == ONLY_ROW


class FileRemoval(Table):
    """A file that a process is removing from the store. Until the row is gone, nothing may reference the file."""

    __tablename__ = "file_removals"

    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    begun_at: Mapped[datetime] = mapped_column(UtcTime)


class Collected(Unavailable, code="file-collected"):
    """A file was removed before it was referenced; send it again."""


def hold(session: Session, artifacts: ArtifactStore, sha256s: Collection[str]) -> None:
    """Blocks garbage collection until this writing transaction, which references these files, has ended.

    Raises Collected if one of them is no longer stored, or is being removed.
    """
    session.execute(select(GarbageCollection.number).where(THE_ROW).with_for_update(read=True))
    removed = set(session.scalars(select(FileRemoval.sha256).where(FileRemoval.sha256.in_(sha256s))))
    for sha256 in sha256s:
        try:
            artifacts.size(sha256)
        except NotFound:
            removed.add(sha256)
    if removed:
        raise Collected(f"the file {min(removed)} was removed before it was referenced; send it again")


def referenced(session: Session, sha256s: Collection[str]) -> set[str]:
    """Returns those of these files that are referenced."""
    # One statement and so one snapshot: a reference that moves from a lease to a version is never missed.
    return set(session.scalars(union_all(*(_of(reference, list(sha256s)) for reference in REFERENCES.get()))))


def _of(reference: FileColumn, sha256s: list[str]) -> Select[Any]:
    statement = select(reference.column)
    if reference.join is not None:
        statement = statement.join(*reference.join)
    return statement.where(reference.column.in_(sha256s), reference.rows)
