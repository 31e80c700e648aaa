"""Training in a child process: starting, stopping and hearing it, and the Python engine.

The Python engine trains with ExecuTorch's or PyTorch's runtime, depending on the program's backend.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.job import Progress

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0  # then it is killed, which costs at most the step in progress
EXIT_SECONDS = 1.0  # from its last message to its exit
LOG_TAIL = 300  # characters


def supervise(
    command: Sequence[str],
    run: RunDirectory,
    report: Callable[[Progress], None],
    stop: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    hear: Callable[[TrainerMessage], None] = lambda _message: None,
) -> TrainerMessage:
    """Runs a command that prints `TrainerMessage` lines until it exits or `stop` returns true; returns its last
    message.

    The command's standard input stays open as long as this process lives. report: called with each progress; hear: with
    each message. Raises DoesNotFit if the process was killed, RuntimeFailed if it exited without a final message.
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
            hear(message)
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
    said = run.log.read_text(errors="replace").strip()[-LOG_TAIL:]
    ended = f"the training process ended with status {process.returncode}"
    raise RuntimeFailed(f"{ended}; see {run.log}: {said}", public=ended)


def _lines(process: subprocess.Popen[bytes], stop: Callable[[], bool]) -> Iterator[bytes]:
    """Yields complete lines of the process's output; after `stop` it has GRACE_SECONDS to exit."""
    output: IO[bytes] = process.stdout  # type: ignore[assignment]  # it is a pipe
    rest, patience = b"", GRACE_SECONDS
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        asked = False
        while patience > 0:
            if not asked and stop():
                process.terminate()
                asked = True
            ready = selector.select(POLL_SECONDS)
            if not ready:
                patience -= POLL_SECONDS if asked else 0
                continue
            piece = output.read1(1 << 16)  # type: ignore[attr-defined]  # a buffered pipe has it
            if not piece:
                return
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole


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


PACKAGES = Path(__file__).resolve().parents[2]


class PythonEngine:
    """Trains each run in a process of its own, which returns torch's memory when it exits."""

    name = "python"

    def train(self, run: RunDirectory, report: Callable[[Progress], None], stop: Callable[[], bool]) -> TrainerMessage:
        """Trains a run; see `Engine.train`."""
        path = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))
        command = (sys.executable, "-m", "device_agent.training.trainer_process", str(run.path))
        return supervise(command, run, report, stop, {"PYTHONPATH": path})
