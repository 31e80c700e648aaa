"""Program files on this device, named by what they hold: fetched once, checked before every use.

Knows no job and no runtime.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from device_agent.client import DeviceClient
from device_agent.errors import DoesNotFit
from shared.canonical import file_sha256
from shared.errors import Untrusted
from shared.program import ProgramFile
from shared.transport import ByteProgress

MARGIN_BYTES = 64 << 20  # left free for the run's own files


class FileCache:
    """A directory of files named by their sha256."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
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

    def reserve(self, files: Sequence[ProgramFile]) -> None:
        """Raises DoesNotFit unless the disk has room for those of `files` that are not here."""
        needed = sum(file.size - self._arrived(file) for file in files if not self.holds(file))
        free = shutil.disk_usage(self._directory).free
        if needed and needed + MARGIN_BYTES > free:
            raise DoesNotFit(
                f"the program needs {needed / 1e6:.0f} MB more on disk and {MARGIN_BYTES / 1e6:.0f} MB beside it, "
                f"but {self._directory} has {free / 1e6:.0f} MB free; free some and the job is tried again"
            )

    def fetch(self, client: DeviceClient, file: ProgramFile, progress: ByteProgress | None = None) -> Path:
        """The file, downloaded unless it is here. Raises Untrusted if the server does not send it, twice."""
        path = self.path(file)
        if not self.holds(file):
            try:
                client.download(file, path, progress)
            except Untrusted:
                # A resumed part may have been bad from before: once more, from nothing.
                self._part(file).unlink(missing_ok=True)
                client.download(file, path, progress)
        return path

    def _part(self, file: ProgramFile) -> Path:
        return self._directory / f"{file.sha256}.part"

    def _arrived(self, file: ProgramFile) -> int:
        part = self._part(file)
        return min(part.stat().st_size, file.size) if part.exists() else 0
