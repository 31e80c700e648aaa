"""Files addressed by their sha256, in a local directory. Knows neither who may read them nor what they mean.

A file is whole or absent: it is written and synced under `staging`, then linked to its name, which never changes
its content again. Reads go through obstore, which an S3 bucket would answer just as well.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from obstore.store import LocalStore

from shared.canonical import file_sha256, sha256_hex
from shared.errors import NotFound, Unavailable, Untrusted

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def _disk() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable("the server's disk is full; nothing was stored, try again later") from error
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ArtifactStore:
    """The files of one server."""

    def __init__(self, root: Path) -> None:
        self._root = root / "objects"
        self._staging = root / "staging"
        for directory in (self._root, self._staging):
            directory.mkdir(parents=True, exist_ok=True)
        self._objects = LocalStore(prefix=self._root)

    @staticmethod
    def _name(sha256: str) -> str:
        return f"{sha256[:2]}/{sha256}"

    def put(self, data: bytes) -> str:
        """Stores bytes and returns their sha256. Raises Unavailable if the disk is full."""
        with _disk():
            descriptor, name = tempfile.mkstemp(dir=self._staging)
            staged = Path(name)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                digest = sha256_hex(data)
                self._link(staged, digest)
            finally:
                staged.unlink(missing_ok=True)
        return digest

    def adopt(self, path: Path, sha256: str) -> None:
        """Takes over a file of this file system without copying it; `path` is gone afterwards.

        Raises Untrusted if its content does not have that sha256, Unavailable if the disk is full.
        """
        if file_sha256(path) != sha256:
            raise Untrusted(f"{path.name} does not have the sha256 that was stated for it")
        with _disk():
            self._link(path, sha256)
        path.unlink()

    def _link(self, staged: Path, sha256: str) -> None:
        target = self._root / self._name(sha256)
        target.parent.mkdir(exist_ok=True)
        _sync(staged)
        try:
            os.link(staged, target)
        except FileExistsError:
            return
        target.chmod(0o440)
        _sync(target.parent)
        _sync(self._root)

    def size(self, sha256: str) -> int:
        """Bytes of a file. Raises NotFound."""
        try:
            return obstore.head(self._objects, self._name(sha256))["size"]
        except FileNotFoundError as error:
            raise NotFound from error

    def read(self, sha256: str) -> bytes:
        """A whole file, its hash checked. Raises NotFound, or Unavailable if it was damaged on disk."""
        try:
            data = bytes(obstore.get(self._objects, self._name(sha256)).bytes())
        except FileNotFoundError as error:
            raise NotFound from error
        if sha256_hex(data) != sha256:
            raise Unavailable(f"the stored file {sha256} is damaged; restore it from a backup")
        return data

    async def stream(self, sha256: str, start: int, end: int) -> AsyncIterator[bytes]:
        """Bytes `start` to `end` (exclusive) of a file, in pieces."""
        if start == end:
            return
        result = await obstore.get_async(self._objects, self._name(sha256), options={"range": (start, end)})
        async for piece in result.stream():
            yield bytes(piece)

    @contextmanager
    def workspace(self, name: str) -> Iterator[Path]:
        """A fresh directory whose files can be adopted; removed at the end, with what was not."""
        path = self._staging / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def workspaces(self) -> list[str]:
        """Names of the workspaces there are, also those that a killed process left."""
        return sorted(path.name for path in self._staging.iterdir() if path.is_dir())

    def remove_workspace(self, name: str) -> None:
        """Removes a workspace that a killed process left."""
        shutil.rmtree(self._staging / name, ignore_errors=True)

    def check_writable(self) -> None:
        """Raises Unavailable unless a file can be written."""
        try:
            with tempfile.TemporaryFile(dir=self._staging) as file:
                file.write(b"\0")
        except OSError as error:
            raise Unavailable(f"the files' directory cannot be written ({error.strerror})") from error
