"""Updates from LoRA-B files that a callback opens: read ahead by threads, given in order. Knows no artifact store.

Hashing, NumPy and reads release Python's lock, so that while one update is added to the mean the next ones are read and
checked on other cores. The order, hence the mean to the bit, does not depend on how many threads there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from shared.errors import InvalidUpload
from shared.federation.intake import Rules, fill, read_header, read_update
from shared.federation.sources import check_members
from shared.federation.update import F32, Contribution, Update

THREADS = 2  # that read ahead
MOST_AHEAD_BYTES = 128 << 20  # of updates that are read ahead; at least one is

# The file of a sha256, at its first byte, unbuffered and seekable; closed by who asked. It need not be checked.
Opener = Callable[[str], BinaryIO]


@dataclass(frozen=True)
class UploadedFile:
    """A member's file, and what it is to be compared with."""

    contribution: Contribution
    sha256: str
    start: F32  # B (D,) that the device began from; members share it


class FileSource:
    """Updates in files, in the order of their members' names."""

    def __init__(self, files: Sequence[UploadedFile], rules: Rules, opener: Opener, threads: int = THREADS) -> None:
        """Raises ValueError for no files, two of one member, or a start of another D."""
        self._files = sorted(files, key=lambda file: file.contribution.member)
        check_members([file.contribution.member for file in self._files])
        if any(file.start.shape != (rules.size,) for file in self._files):
            raise ValueError(f"every start must have D = {rules.size} elements")
        self._rules, self._open, self._threads = rules, opener, threads

    @property
    def size(self) -> int:
        """D: elements of each update."""
        return self._rules.size

    @property
    def contributions(self) -> Sequence[Contribution]:
        """What each update is but for its numbers."""
        return [file.contribution for file in self._files]

    def updates(self) -> Iterator[Update]:
        """Every update, checked whole. Raises InvalidUpload naming the member."""
        ahead = max(1, min(self._threads + 1, MOST_AHEAD_BYTES // (4 * self.size)))
        spare = [np.empty(self.size, np.float32) for _ in range(ahead)]
        pending: deque[tuple[UploadedFile, F32, Future[float]]] = deque()
        waiting = iter(self._files)
        with ThreadPoolExecutor(self._threads, thread_name_prefix="intake") as pool:
            try:
                while True:
                    while spare and (file := next(waiting, None)) is not None:
                        flat = spare.pop()
                        pending.append((file, flat, pool.submit(self._read, file, flat)))
                    if not pending:
                        return
                    file, flat, reading = pending.popleft()
                    norm = reading.result()
                    who = file.contribution
                    yield Update(who.member, flat, who.examples, who.staleness, norm)
                    spare.append(flat)
            finally:
                for _, _, reading in pending:
                    reading.cancel()

    def _read(self, file: UploadedFile, flat: F32) -> float:
        try:
            with self._open(file.sha256) as opened:
                return read_update(opened, file.sha256, self._rules, file.start, flat)
        except InvalidUpload as error:
            raise InvalidUpload(f"{file.contribution.member}: {error.detail}") from error

    def blocks(self, columns: int) -> Iterator[tuple[int, F32]]:
        """All updates side by side; the files' hashes are not looked at again."""
        block = np.empty((len(self._files), columns), np.float32)
        for at in range(0, self.size, columns):
            width = min(columns, self.size - at)
            for row, file in zip(block, self._files, strict=True):
                with self._open(file.sha256) as opened:
                    opened.seek(len(read_header(opened, self._rules)) + 4 * at)
                    part = row[:width]
                    fill(opened, part.data.cast("B"))
                    np.subtract(part.view("<f4"), file.start[at : at + width], out=part)
            yield at, block[:, :width]
