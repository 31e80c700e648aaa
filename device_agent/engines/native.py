"""Training by the native runner, a child process that links no torch. Knows no server.

Two short-lived helpers stand before and after it: `prepare` has a process of its own read the data into the plan, and
`finish` makes the result of what the runner left in the run's directory. The adb engine uses both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from device_agent.conclusion import conclude, handed_in
from device_agent.engines.python import PACKAGES
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.journal import RunDirectory
from device_agent.messages import Message
from device_agent.supervisor import supervise
from shared.canonical import file_sha256
from shared.job import Progress
from shared.lora import F32
from shared.trajectory import parse_trajectory

LOG_TAIL = 300  # characters
NOTE_SECONDS = 5.0  # between two notes of time and memory, each of which is synced


class NativeEngine:
    """Each run by a `mobizo-runner` of this machine."""

    name = "native"

    def __init__(self, runner: Path) -> None:
        """runner: the directory that holds `mobizo-runner` and its libraries."""
        self._runner = runner

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> Message:
        """Trains a run; see `Engine.train`."""
        refused = prepare(run)
        if refused is not None:
            return refused
        before = run.figures()
        plan = run.plan()
        command = (
            str(self._runner / "mobizo-runner"),
            *("train", "--attached", "--run", str(run.path)),
            *("--program", str(plan.program), "--weights", str(plan.weights)),
        )

        noted = 0.0

        def hear(message: Message) -> None:
            nonlocal noted
            now = time.monotonic()
            if message.spent is not None and (message.progress is None or now - noted > NOTE_SECONDS):
                noted = now
                run.note(before.plus(message.spent))

        return finish(run, supervise(command, run, report, stop, hear=hear))


def prepare(run: RunDirectory) -> Message | None:
    """Makes the plan of a run, unless it lies there whole; what is wrong with the data, if anything.

    Raises DoesNotFit when the disk is full, RuntimeFailed if the process died without a word.
    """
    prepared = run.prepared()
    if prepared is not None and run.native_plan.exists() and file_sha256(run.native_plan) == prepared.plan_sha256:
        return None
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "device_agent.preparation", str(run.path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    if done.stdout:
        message = Message.model_validate_json(done.stdout)
        if message.error is not None and message.error.code == DoesNotFit.code:
            raise DoesNotFit(message.error.detail)
        return message
    if done.returncode != 0:
        raise RuntimeFailed(f"the data could not be read: {done.stderr.strip()[-LOG_TAIL:]}")
    return None


def finish(run: RunDirectory, message: Message) -> Message:
    """The message with the result, if the runner has trained to the end; both adapters are then in their files.

    Raises RuntimeFailed if what the runner left is not whole.
    """
    if not message.trained:
        return message
    plan, prepared = run.plan(), run.prepared()
    trajectory, _ = parse_trajectory(run.ledger.read_bytes())
    if trajectory is None or prepared is None or trajectory.steps != plan.training.steps:
        raise RuntimeFailed(f"the runner said that it was done, but {run.ledger} is not whole; remove the run")
    best = handed_in(plan, trajectory)
    run.write_adapter(run.last, _read_b(run.path / "last.f32", plan.manifest.size), plan, trajectory.steps)
    chosen = _read_b(run.path / "best.f32", plan.manifest.size)
    run.write_adapter(run.best, chosen, plan, best.step if best else trajectory.steps)
    result = conclude(plan, trajectory, run.figures(), prepared.train_examples, prepared.truncated_examples)
    run.finish(result)
    return Message(result=result)


def _read_b(path: Path, size: int) -> F32:
    flat = np.frombuffer(path.read_bytes(), "<f4")
    if flat.shape != (size,) or not np.isfinite(flat).all():
        raise RuntimeFailed(f"{path} is no B of this program; remove the run's directory to train it anew")
    return flat.astype(np.float32)
