"""The engines of this machine: each run trains in a child process, natively or in Python.

The native runner needs no PyTorch. `prepare` reads the data into its plan file beforehand, in a process of its own, and
`finish` builds the result from its files; the adb engine uses both. The Python engine trains with ExecuTorch's or
PyTorch's runtime, depending on the program's backend.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from device_agent.durable import disk_full_as_does_not_fit
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.runner.location import packed_path
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from device_agent.training.result import build_result, finished, uploaded_validation
from shared.canonical import file_sha256
from shared.job import Progress
from shared.zo.lora import F32
from shared.zo.trajectory import parse_trajectory

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0  # then it is killed, which costs at most the step in progress
EXIT_SECONDS = 1.0  # from its last message to its exit
LOG_TAIL = 300  # characters
PACKAGES = Path(__file__).resolve().parents[2]
RECORD_SECONDS = 5.0  # between two records of time and memory, each of which is synced


def supervise(
    command: Sequence[str],
    run: RunDirectory,
    report: Callable[[Progress], None],
    stop: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    on_message: Callable[[TrainerMessage], None] = lambda _message: None,
) -> TrainerMessage:
    """Runs a command that prints `TrainerMessage` lines until it exits or `stop` returns true; returns its last
    message.

    The command's standard input stays open as long as this process lives. report: called with each progress.
    on_message: called with each message.

    Raises DoesNotFit if the process was killed, RuntimeFailed if it exited without a final message.
    """
    with run.log.open("wb") as log:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=None if environment is None else {**os.environ, **environment},
        )
    last: TrainerMessage | None = None
    try:
        for line in _lines(process, stop):
            message = TrainerMessage.model_validate_json(line)
            on_message(message)
            if message.progress is not None:
                report(message.progress)
            else:
                last = message
    finally:
        _end(process)
    if last is not None:
        if last.error is not None and last.error.code == DoesNotFit.code:
            raise DoesNotFit(last.error.detail)
        return last
    if stop():
        return TrainerMessage(stopped=True)
    if process.returncode == -signal.SIGKILL:
        raise DoesNotFit("the training process was killed, most likely for want of memory; the run goes on later")
    output = run.log.read_text(errors="replace").strip()[-LOG_TAIL:]
    ended = f"the training process ended with status {process.returncode}"
    raise RuntimeFailed(f"{ended}; see {run.log}: {output}", public=ended)


def _lines(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> Iterator[bytes]:
    """Yields complete lines of the process's output; after `stop` it has GRACE_SECONDS to exit."""
    output: IO[bytes] = process.stdout  # type: ignore[assignment]  # it is a pipe
    partial, patience = b"", GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        stop_requested = False
        while patience > 0:
            if not stop_requested and stop():
                process.terminate()
                stop_requested = True
            ready = selector.select(POLL_SECONDS)
            if not ready:
                patience -= POLL_SECONDS if stop_requested else 0
                continue
            piece = output.read1(1 << 16)  # type: ignore[attr-defined]  # a buffered pipe has it
            if not piece:
                return
            *lines, partial = (partial + piece).split(b"\n")
            yield from lines


def _end(process: subprocess.Popen[bytes]) -> None:
    """Makes sure that the process has exited."""
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


class PythonEngine:
    """Trains each run in a process of its own, which returns torch's memory when it exits."""

    name = "python"

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run; see `Engine.train`."""
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "device_agent.training.trainer_process", str(run.path))
        return supervise(command, run, report, stop, {"PYTHONPATH": path})


class NativeEngine:
    """Trains each run with this machine's `mobizo-runner`."""

    name = "native"

    def __init__(self, runner: Path) -> None:
        """runner: the directory of `mobizo-runner` and its libraries."""
        self._runner = runner

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run; see `Engine.train`."""
        with disk_full_as_does_not_fit():
            return prepare(run) or self._train(run, report, stop)

    def _train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        earlier_usage = run.figures()
        plan = run.plan()
        command = (
            str(self._runner / "mobizo-runner"),
            *("train", "--attached", "--run", str(run.path)),
            *("--program", str(plan.program), "--weights", str(plan.weights)),
            *("--packed", str(packed_path(plan.weights))),
        )

        recorded_at = 0.0

        def record_usage(message: TrainerMessage) -> None:
            nonlocal recorded_at
            now = time.monotonic()
            if message.spent is not None and (message.progress is None or now - recorded_at > RECORD_SECONDS):
                recorded_at = now
                run.record_usage(earlier_usage.plus(message.spent))

        return finish(run, supervise(command, run, report, stop, on_message=record_usage))


def prepare(run: RunDirectory) -> TrainerMessage | None:
    """Writes the run's plan file unless it is complete; returns a message if the data is unusable.

    Raises DoesNotFit if the disk is full, RuntimeFailed if the process died without a message.
    """
    prepared = run.prepared()
    if prepared is not None and run.native_plan.exists() and file_sha256(run.native_plan) == prepared.plan_sha256:
        return None
    path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "-m", "device_agent.training.plan", str(run.path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    if result.stdout:
        message = TrainerMessage.model_validate_json(result.stdout)
        if message.error is not None and message.error.code == DoesNotFit.code:
            raise DoesNotFit(message.error.detail)
        return message
    if result.returncode != 0:
        ended = f"the process that prepares the data ended with status {result.returncode}"
        raise RuntimeFailed(f"{ended}: {result.stderr.strip()[-LOG_TAIL:]}", public=ended)
    return None


def finish(run: RunDirectory, message: TrainerMessage) -> TrainerMessage:
    """Adds the result to the runner's final message and writes both adapter files, if training is complete.

    Raises RuntimeFailed if the runner's files are incomplete.
    """
    if not message.trained:
        return message
    plan, prepared = run.plan(), run.prepared()
    trajectory, _ = parse_trajectory(run.ledger.read_bytes())
    if trajectory is None or prepared is None or not finished(plan, trajectory):
        raise RuntimeFailed(f"the runner said that it was done, but {run.ledger} is not whole; remove the run")
    best = uploaded_validation(plan, trajectory)
    run.write_adapter(run.last, _read_b(run.path / "last.f32", plan.manifest.size), plan, trajectory.steps)
    adapter = _read_b(run.path / "best.f32", plan.manifest.size)
    run.write_adapter(run.best, adapter, plan, best.step if best else trajectory.steps)
    result = build_result(plan, trajectory, run.figures(), prepared.examples)
    run.finish(result)
    return TrainerMessage(result=result)


def _read_b(path: Path, size: int) -> F32:
    flat = np.frombuffer(path.read_bytes(), "<f4")
    if flat.shape != (size,) or not np.isfinite(flat).all():
        raise RuntimeFailed(f"{path} is no B of this program; remove the run's directory to train it anew")
    return flat.astype(np.float32)
