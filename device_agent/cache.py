"""Program files on this device, named by what they hold: fetched once, checked before every use, of bounded size.

    SHA256        a whole file; its access time is noted at each use, by this program itself
    SHA256.part   what has arrived of one

When room is wanted the file unused for longest goes, but none that a run in progress or a kept adapter needs.
Knows no job and no runtime.
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

from device_agent.client import DeviceClient
from device_agent.errors import DoesNotFit
from shared.canonical import file_sha256
from shared.errors import Untrusted
from shared.program import ProgramFile
from shared.transport import ByteProgress, Unreachable

MARGIN_BYTES = 64 << 20  # left free for the run's own files
LARGEST_BYTES = 20 * 10**9  # of all files, unless the disk is small
DISK_SHARE = 0.5  # of the whole disk, at most

_log = structlog.get_logger()


class FileCache:
    """A directory of files named by their sha256."""

    def __init__(self, directory: Path, limit: int | None = None, pins: Callable[[], Iterable[str]] = tuple) -> None:
        """limit: bytes of all files; by default LARGEST_BYTES or DISK_SHARE of the disk, whichever is less.

        pins: sha256 of the files that must stay, whoever else wants room.
        """
        self._directory, self._limit, self._pins = directory, limit, pins
        self._held: frozenset[str] = frozenset()
        # (sha256, size, mtime in ns) found right by this process: hashing gigabytes once is enough.
        self._checked: set[tuple[str, int, int]] = set()

    def path(self, file: ProgramFile) -> Path:
        """Where the file is, or would be."""
        return self._directory / file.sha256

    def holds(self, file: ProgramFile) -> bool:
        """Whether the file is here, whole; a damaged one is removed."""
        path = self.path(file)
        try:
            found = path.stat()
        except FileNotFoundError:
            return False
        known = (file.sha256, found.st_size, found.st_mtime_ns)
        if known in self._checked:
            return True
        if found.st_size == file.size and file_sha256(path) == file.sha256:
            self._checked.add(known)
            return True
        path.unlink()
        return False

    @contextlib.contextmanager
    def hold(self, files: Sequence[ProgramFile]) -> Iterator[None]:
        """Keeps `files` from being removed for room: a run in progress uses them."""
        before, self._held = self._held, self._held | {file.sha256 for file in files}
        try:
            yield
        finally:
            self._held = before

    def reserve(self, files: Sequence[ProgramFile]) -> None:
        """Makes room for those of `files` that are not here, by removing others. Raises DoesNotFit if there is none."""
        needed = sum(file.size - self._arrived(file) for file in files if not self.holds(file))
        if needed == 0:
            return
        disk = shutil.disk_usage(self._directory)
        limit = min(LARGEST_BYTES, int(disk.total * DISK_SHARE)) if self._limit is None else self._limit
        found = self._files()
        used = sum(size for _, _, size in found)
        pinned = self._held.union(self._pins(), (file.sha256 for file in files))
        spare = [(path, size) for _, path, size in sorted(found) if path.stem not in pinned]
        room = sum(size for _, size in spare)
        if needed > limit - used + room:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB more of a cache of at most {limit / 1e6:.0f} MB, in which "
                f"runs and kept adapters use {(used - room) / 1e6:.0f} MB; allow it more, or give an adapter up"
            )
        if needed + MARGIN_BYTES > disk.free + room:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB more on disk and {MARGIN_BYTES / 1e6:.0f} MB beside it, "
                f"but {self._directory} has {disk.free / 1e6:.0f} MB free; free some and the job is tried again"
            )
        excess = max(used + needed - limit, needed + MARGIN_BYTES - disk.free)
        for path, size in spare:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size
            _log.info("a program file unused for longest was removed for room", sha256=path.stem, bytes=size)

    def fetch(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None = None) -> Path:
        """The file, downloaded unless it is here. Raises Untrusted if the server does not send it, twice."""
        path = self.path(file)
        if not self.holds(file):
            try:
                self._download(client, file, progress)
            except Untrusted:
                # A resumed part may have been bad from before: once more, from nothing.
                self._part(file).unlink(missing_ok=True)
                self._download(client, file, progress)
        self._use(path)
        return path

    def _download(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None) -> None:
        """Tries as long as anything arrives: a link that drops every few megabytes still brings gigabytes."""
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
        """Notes that the file is used now: after every other, even if the clock was set back meanwhile."""
        latest = max((at for at, _, _ in self._files()), default=0)
        # Worth no failed job where times cannot be written.
        with contextlib.suppress(OSError):
            os.utime(path, ns=(max(time.time_ns(), latest + 1), path.stat().st_mtime_ns))

    def _files(self) -> list[tuple[int, Path, int]]:
        """(last use in ns, path, bytes) of every file and part."""
        found = []
        for path in self._directory.iterdir():
            if re.fullmatch(r"[0-9a-f]{64}(\.part)?", path.name):
                stat = path.stat()
                found.append((stat.st_atime_ns, path, stat.st_size))
        return found

    def _part(self, file: ProgramFile) -> Path:
        return self._directory / f"{file.sha256}.part"

    def _arrived(self, file: ProgramFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.exists() else 0
