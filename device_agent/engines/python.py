"""Training in a Python child process: the program's own runtime is ExecuTorch's or PyTorch's, by its backend.

Knows no data and no server.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from device_agent.journal import RunDirectory
from device_agent.messages import Message
from device_agent.supervisor import supervise
from shared.job import Progress

PACKAGES = Path(__file__).resolve().parents[2]


class PythonEngine:
    """Each run in a process of its own, so that torch's memory goes back when it ends."""

    name = "python"

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> Message:
        """Trains a run; see `Engine.train`."""
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "device_agent.trainer_process", str(run.path))
        return supervise(command, run, report, stop, {"PYTHONPATH": path})
