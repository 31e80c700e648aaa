"""Reads updates from LoRA-B files that a callback opens. Threads read ahead; updates are returned in a fixed order.

Hashing, NumPy and reads release Python's global interpreter lock, so the next updates are read and validated on other
cores while one is added to the mean. The order, and so the mean, does not depend on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from shared.errors import InvalidUpload
from shared.federation.intake import UpdateRequirements, read_exactly, read_header, read_update
from shared.federation.sources import check_members
from shared.federation.update import F32, Contribution, Update

THREADS = 2  # threads that read ahead
MAX_AHEAD_BYTES = 128 << 20  # maximum bytes of updates read ahead; at least one update is

# Opens the file of a sha256, unbuffered and seekable. The caller closes it and verifies the hash.
Opener = Callable[[str], BinaryIO]


@dataclass(frozen=True)
class UploadedFile:
    """A member's file, its expected sha256 and the B that its training started from."""

    contribution: Contribution
    sha256: str
    start: F32  # B (D,) that the device began from; members share it


class FileSource:
    """An `UpdateSource` of files, in the order of their members' names."""

    def __init__(
        self, files: Sequence[UploadedFile], requirements: UpdateRequirements, opener: Opener, threads: int = THREADS
    ) -> None:
        """Raises ValueError for no files, two files of one member, or a start of another size."""
        self._files = sorted(files, key=lambda file: file.contribution.member)
        check_members([file.contribution.member for file in self._files])
        if any(file.start.shape != (requirements.size,) for file in self._files):
            raise ValueError(f"every start must have D = {requirements.size} elements")
        self._requirements, self._open, self._threads = requirements, opener, threads

    @property
    def size(self) -> int:
        """D: elements of each update."""
        return self._requirements.size

    @property
    def contributions(self) -> Sequence[Contribution]:
        """The contribution of each update."""
        return [file.contribution for file in self._files]

    def updates(self) -> Iterator[Update]:
        """Yields every update, fully validated. Raises InvalidUpload, naming the member."""
        buffer_count = max(1, min(self._threads + 1, MAX_AHEAD_BYTES // (4 * self.size)))
        buffers = [np.empty(self.size, np.float32) for _ in range(buffer_count)]
        pending: deque[tuple[UploadedFile, F32, Future[float]]] = deque()
        waiting = iter(self._files)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="intake") as pool:
            try:
                while True:
                    while buffers and (file := next(waiting, None)) is not None:
                        flat = buffers.pop()
                        pending.append((file, flat, pool.submit(self._read, file, flat)))
                    if not pending:
                        return
                    file, flat, future = pending.popleft()
                    norm = future.result()
                    contribution = file.contribution
                    yield Update(contribution.member, flat, contribution.examples, contribution.staleness, norm)
                    buffers.append(flat)
            finally:
                for _, _, future in pending:
                    future.cancel()

    def _read(self, file: UploadedFile, flat: F32) -> float:
        try:
            with self._open(file.sha256) as stream:
                return read_update(stream, file.sha256, self._requirements, file.start, flat)
        except InvalidUpload as error:
            raise InvalidUpload(f"{file.contribution.member}: {error.detail}") from error

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """Yields all updates side by side. The files' hashes are not verified again."""
        block = np.empty((len(self._files), columns), np.float32)
        for offset in range(0, self.size, columns):
            width = min(columns, self.size - offset)
            for row, file in zip(block, self._files, strict=True):
                with self._open(file.sha256) as stream:
                    stream.seek(len(read_header(stream, self._requirements)) + 4 * offset)
                    part = row[:width]
                    read_exactly(stream, part.data.cast("B"))
                    np.subtract(part.view("<f4"), file.start[offset : offset + width], out=part)
            yield offset, block[:, :width]
