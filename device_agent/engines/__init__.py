"""The engine interface: trains a whole run in its directory.

    native    the runner, a C++ program, as a child process: no torch anywhere
    python    ExecuTorch's or PyTorch's own Python runtime in a child process
    adb       the runner on a phone, which goes on while the link is down

Every engine obeys one contract: the run's directory is the truth (`device_agent.training.journal`), a step is in the
ledger before the next begins, what the ledger has is replayed and never computed again, and the run's limits are
read before each step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.job import Progress


class Engine(Protocol):
    """Trains runs that `RunDirectory.begin` recorded."""

    name: str

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run until it ends or `stop` says so (asked several times a second); the journal stays.

        Returns a message with `result`, `error` or `stopped`. Raises DoesNotFit if memory ran out, Unavailable if what
        runs the program is away for now, RuntimeFailed if it died without a word.
        """
