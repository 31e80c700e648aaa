"""Checkpoints of a run with an optimizer: B and the optimizer's state after some steps.

The trajectory of such a run does not reproduce the optimizer's state, so the run resumes from its last checkpoint and
recomputes the steps after it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

from shared.durable import write_durably
from shared.zo.lora import F32

CHECKPOINT_STEPS = 10  # the maximum number of steps that a resumed run recomputes

_NAME = re.compile(r"step-(\d+)\.bin")


class Checkpoints:
    """Checkpoints, one NumPy archive each, keyed by the number of completed steps."""

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
        # A damaged archive raises errors of many kinds.
        with suppress(Exception), np.load(self._file(step)) as archive:
            state: F32 = archive["state"]
            return state
        return None

    def write(self, step: int, state: F32) -> None:
        """Stores the state, float32 (M,), after `step` steps; it is durable when this method returns."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        archive = io.BytesIO()
        np.savez(archive, state=state)
        write_durably(self._file(step), archive.getvalue())

    def keep(self, steps: Iterable[int]) -> None:
        """Removes all checkpoints except those of `steps`."""
        kept_steps = set(steps)
        for step in self.steps():
            if step not in kept_steps:
                self._file(step).unlink(missing_ok=True)

    def _file(self, step: int) -> Path:
        return self.path / f"step-{step}.bin"
