"""Checkpoints of a run with an optimizer: B and the optimizer's state after some steps.

The trajectory of such a run does not reproduce the optimizer's state, so the run resumes from its last checkpoint and
recomputes the steps after it.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from device_agent.durable import write_durably
from shared.zo.lora import F32

CHECKPOINT_STEPS = 10  # the maximum number of steps that a resumed run recomputes

MAGIC = b"MOBIZO-CHECKPOINT 1\n"
_HEAD = struct.Struct("<II")  # steps, CRC-32 of the state
_NAME = re.compile(r"step-(\d+)\.bin")


class Checkpoints:
    """Checkpoints, one file each, keyed by the number of completed steps.

    A file has magic, steps and CRC-32 (uint32 each), then the state; little-endian.
    """

    def __init__(self, path: Path) -> None:
        """path: a directory; the first write creates it."""
        self.path = path

    def steps(self) -> list[int]:
        """Returns the numbers of steps that have a checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        names = (_NAME.fullmatch(file.name) for file in self.path.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, step: int) -> F32 | None:
        """Returns the state, float32 (M,), after `step` steps; None if the checkpoint is absent or damaged."""
        file = self._file(step)
        data = file.read_bytes() if file.is_file() else b""
        start = len(MAGIC) + _HEAD.size
        if not data.startswith(MAGIC) or len(data) < start:
            return None
        state = data[start:]
        intact = len(state) % 4 == 0 and _HEAD.unpack_from(data, len(MAGIC)) == (step, zlib.crc32(state))
        return np.frombuffer(state, "<f4").astype(np.float32) if intact else None

    def write(self, step: int, state: F32) -> None:
        """Stores the state, float32 (M,), after `step` steps; it is durable when this method returns."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        data = np.ascontiguousarray(state, "<f4").tobytes()
        write_durably(self._file(step), MAGIC + _HEAD.pack(step, zlib.crc32(data)) + data)

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all checkpoints except those of `steps`."""
        kept_steps = set(steps)
        for step in self.steps():
            if step not in kept_steps:
                self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step}.bin"
