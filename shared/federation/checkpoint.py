"""How far a streaming mean has come, on disk: sums, and how many updates are in them, in one file that is whole or old.

A kill -9 at any moment leaves the file of before or after a save, never a mixture; the updates counted in it are those
it says, so that going on from there counts nobody twice. Knows neither updates nor rounds.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np

from shared.canonical import canonical_json
from shared.federation.mean import WeightedMean

_DIGEST_BYTES = 32
_LENGTH_BYTES = 4


class Checkpoint:
    """One file: sha256 of the rest, length of the head (uint32, little-endian), head (JSON), sums (D float64)."""

    def __init__(self, path: Path, *, seconds: float = 10.0, updates: int | None = None) -> None:
        """seconds: between saves. updates: also after each so many, if given."""
        self._path, self._seconds, self._updates = path, seconds, updates
        self._saved_at, self._saved_count = time.monotonic(), 0

    def load(self, identity: str, size: int) -> tuple[WeightedMean, int] | None:
        """(the mean as far as it had come, how many updates were clipped), if the file is of these updates.

        None if there is none, if it is damaged, or if it is of other updates: one begins anew then.
        """
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        body = memoryview(data)[_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != data[:_DIGEST_BYTES]:
            return None
        start = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
        head = json.loads(bytes(body[_LENGTH_BYTES:start]))
        if (head["identity"], head["size"]) != (identity, size):
            return None
        mean = WeightedMean(size)
        mean.sums[:] = np.frombuffer(body[start:], "<f8")
        mean.weight, mean.count = head["weight"], head["count"]
        self._saved_count = mean.count
        return mean, head["clipped"]

    def save_if_due(self, identity: str, mean: WeightedMean, clipped: int) -> None:
        """Saves if long enough has passed since the last time."""
        many = self._updates is not None and mean.count - self._saved_count >= self._updates
        if many or time.monotonic() - self._saved_at >= self._seconds:
            self.save(identity, mean, clipped)

    def save(self, identity: str, mean: WeightedMean, clipped: int) -> None:
        """Puts the mean in the place of what was saved before; on the disk when it returns."""
        about = {
            "identity": identity,
            "size": mean.sums.size,
            "weight": mean.weight,
            "count": mean.count,
            "clipped": clipped,
        }
        head = canonical_json(about)
        sums = mean.sums.astype("<f8", copy=False).data
        digest = hashlib.sha256(len(head).to_bytes(_LENGTH_BYTES, "little") + head)
        digest.update(sums)
        part = self._path.with_name(self._path.name + ".part")
        with part.open("wb") as file:
            for piece in (digest.digest(), len(head).to_bytes(_LENGTH_BYTES, "little"), head, sums):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._saved_at, self._saved_count = time.monotonic(), mean.count

    def remove(self) -> None:
        """Forgets what was saved; the round is done."""
        self._path.unlink(missing_ok=True)
        self._path.with_name(self._path.name + ".part").unlink(missing_ok=True)
