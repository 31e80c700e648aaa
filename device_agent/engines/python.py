"""Trains in a Python child process with ExecuTorch's or PyTorch's runtime, depending on the program's backend."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from device_agent.training.supervisor import supervise
from shared.job import Progress

PACKAGES = Path(__file__).resolve().parents[2]


class PythonEngine:
    """Trains each run in a process of its own, which returns torch's memory when it exits."""

    name = "python"

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run; see `Engine.train`."""
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "device_agent.training.trainer_process", str(run.path))
        return supervise(command, run, report, stop, {"PYTHONPATH": path})
