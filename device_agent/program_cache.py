"""Cache of program files by sha256: downloaded once, verified before every use, limited in size.

    SHA256        a complete file; its access time is updated at each use
    SHA256.part   a partial download

The least recently used file is evicted first, except for files of the current run and of stored adapters.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import structlog

from device_agent.errors import DoesNotFit
from device_agent.protocol.client import DeviceClient
from shared.canonical import file_sha256
from shared.errors import Untrusted
from shared.program import ProgramFile
from shared.transport import ByteProgress, Unreachable

MARGIN_BYTES = 64 << 20  # left free for the run's own files
LARGEST_BYTES = 20 * 10**9  # of all files, unless the disk is small
DISK_SHARE = 0.5  # of the whole disk, at most

_log = structlog.get_logger()


class ProgramCache:
    """A size-limited directory of program files named by their sha256."""

    def __init__(self, directory: Path, limit: int | None = None, pins: Callable[[], Iterable[str]] = tuple) -> None:
        """limit: maximum size of all files in bytes; default: LARGEST_BYTES or DISK_SHARE of the disk, whichever is
        less.

        pins: returns the sha256 of files that must not be evicted.
        """
        self._directory, self._limit, self._pins = directory, limit, pins
        self._held: frozenset[str] = frozenset()
        # (sha256, size, mtime in ns) of files that this process has verified, because hashing gigabytes takes seconds.
        self._checked: set[tuple[str, int, int]] = set()

    def path(self, file: ProgramFile) -> Path:
        """Returns the path of a file, whether or not it exists."""
        return self._directory / file.sha256

    def holds(self, file: ProgramFile) -> bool:
        """Returns whether the complete file is cached; removes a damaged one."""
        path = self.path(file)
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        known = (file.sha256, stat.st_size, stat.st_mtime_ns)
        if known in self._checked:
            return True
        if stat.st_size == file.size and file_sha256(path) == file.sha256:
            self._checked.add(known)
            return True
        path.unlink()
        return False

    @contextlib.contextmanager
    def hold(self, files: Sequence[ProgramFile]) -> Iterator[None]:
        """Protects `files` from eviction while they are in use."""
        before, self._held = self._held, self._held | {file.sha256 for file in files}
        try:
            yield
        finally:
            self._held = before

    def reserve(self, files: Sequence[ProgramFile]) -> None:
        """Evicts files until the missing ones of `files` fit. Raises DoesNotFit if that is not possible."""
        needed = sum(file.size - self._arrived(file) for file in files if not self.holds(file))
        if needed == 0:
            return
        disk = shutil.disk_usage(self._directory)
        limit = min(LARGEST_BYTES, int(disk.total * DISK_SHARE)) if self._limit is None else self._limit
        entries = self._files()
        used = sum(size for _, _, size in entries)
        pinned = self._held.union(self._pins(), (file.sha256 for file in files))
        spare = [(path, size) for _, path, size in sorted(entries) if path.stem not in pinned]
        evictable = sum(size for _, size in spare)
        if needed > limit - used + evictable:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB in a cache of at most {limit / 1e6:.0f} MB, of which "
                f"runs and stored adapters use {(used - evictable) / 1e6:.0f} MB; remove a stored adapter"
            )
        if needed + MARGIN_BYTES > disk.free + evictable:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB on disk and {MARGIN_BYTES / 1e6:.0f} MB for the run, "
                f"but {self._directory} has {disk.free / 1e6:.0f} MB free; free some space, and the job is retried"
            )
        excess = max(used + needed - limit, needed + MARGIN_BYTES - disk.free)
        for path, size in spare:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
            _log.info("evicted the least recently used program file", sha256=path.stem, bytes=size)

    def fetch(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None = None) -> Path:
        """Returns the path of a file, downloading it if necessary. Raises Untrusted if two downloads have another
        hash.
        """
        path = self.path(file)
        if not self.holds(file):
            try:
                self._download(client, file, progress)
            except Untrusted:
                # A resumed partial download may be corrupt: retry once from the beginning.
                self._part(file).unlink(missing_ok=True)
                self._download(client, file, progress)
        self._use(path)
        return path

    def _download(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None) -> None:
        """Resumes the download for as long as each attempt transfers data."""
        while True:
            before = self._arrived(file)
            try:
                client.download(file, self.path(file), progress)
            except Unreachable:
                if self._arrived(file) <= before:
                    raise
            else:
                return

    def _use(self, path: Path) -> None:
        """Marks the file as the most recently used one, even if the clock was set back."""
        latest = max((at for at, _, _ in self._files()), default=0)
        # A file system without access times must not fail the job.
        with contextlib.suppress(OSError):
            os.utime(path, ns=(max(time.time_ns(), latest + 1), path.stat().st_mtime_ns))

    def _files(self) -> list[tuple[int, Path, int]]:
        """Returns (last use in ns, path, bytes) of every complete or partial file."""
        entries = []
        for path in self._directory.iterdir():
            if re.fullmatch(r"[0-9a-f]{64}(\.part)?", path.name):
                stat = path.stat()
                entries.append((stat.st_atime_ns, path, stat.st_size))
        return entries

    def _part(self, file: ProgramFile) -> Path:
        return self._directory / f"{file.sha256}.part"

    def _arrived(self, file: ProgramFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.exists() else 0
