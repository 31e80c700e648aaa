"""Executors run a program's methods for the training loop and for inference.

    native    `mobizo-runner`, a C++ process on this machine: no torch anywhere
    adb       the same process on a phone
    python    a Python process with ExecuTorch's runtime, or with PyTorch for `.pt2` programs

All of them are processes that serve one protocol over their pipes (`process.py`). An executor holds B and nothing else
of a run: the run's directory on this machine is the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Arrays = tuple[NDArray[Any], ...]


@dataclass(frozen=True)
class ExecutorUsage:
    """Resident memory now and at its peak, in bytes, and the seconds spent loading methods so far."""

    rss_bytes: int = 0
    peak_rss_bytes: int = 0
    load_seconds: float = 0.0


class Executor(Protocol):
    """A loaded program with one B, which is zero at first."""

    def call(self, method: str, inputs: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        """Returns the outputs of a method. Raises RuntimeFailed, DoesNotFit, Unavailable, or Stopped."""

    def usage(self) -> ExecutorUsage:
        """Returns the memory and load time of the executor's process."""

    def close(self) -> None:
        """Ends the executor and frees the program's memory."""
