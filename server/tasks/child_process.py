"""Runs a worker's heavy task as a child process, reads its output, and stops it.

The command prints one JSON object per line: stages while it runs, then its result, or {"error": {"code", "detail"}} and
exit code 1. Any other end is a crash.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import psutil
import structlog

from server.tasks.parent_death_signal import bound_to_parent
from shared.errors import MobizoError, from_problem

# A task computes in Python for the most part. Threads of its libraries would mostly wait for each other, which takes
# processor time from other workers; on a machine with idle cores, more workers help. An operator's own setting wins.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

_log = structlog.get_logger()


@dataclass(frozen=True)
class Stopped:
    """The result of a task that was stopped before it ended."""


def _log_stage(stage: dict[str, Any]) -> None:
    _log.info("working", stage=stage)


@dataclass
class ChildProcess:
    """One task.

    keep: called every `interval` seconds; returns whether the task continues. on_stage: called with each stage. log:
    receives all other output of the task and its libraries; None: this process's standard error.
    """

    task: ClassVar[str]  # name of the task in messages
    result: ClassVar[str]  # member of the last line that contains the result
    failed: ClassVar[type[MobizoError]]  # raised when the task fails
    crashed: ClassVar[type[MobizoError]]  # raised when the task ends without a result or an error

    command: list[str]
    interval: float
    memory_limit: int | None
    keep: Callable[[], bool]
    on_stage: Callable[[dict[str, Any]], None] = _log_stage
    log: IO[bytes] | None = None
    peak_rss_bytes: int = 0

    def listen(self, arguments: list[str]) -> Any | Stopped:
        """Runs the task and returns its result; no process is left when it returns or raises.

        Raises the error that the task reports, `crashed`, or `failed` if it takes too much memory.
        """
        # A separate session, so that all processes that it starts can be killed at once.
        process = subprocess.Popen(
            bound_to_parent([*self.command, *arguments]),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            env=ONE_THREAD | os.environ,
            start_new_session=True,
        )
        output = _Listener(process.stdout, self.on_stage, self.result)
        try:
            if not self._watch(process):
                return Stopped()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.join()
        if "error" in output.last:
            error = output.last["error"]
            raise from_problem(error) if isinstance(error, dict) else self.failed()
        if self.result not in output.last or process.returncode != 0:
            code = process.returncode
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise self.crashed(f"the {self.task} ended {how} before it was done; the server's log has its output")
        return output.last[self.result]

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end; False if the task is to stop before. Raises `failed` over the memory limit."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.interval)
                return True
            self.peak_rss_bytes = max(self.peak_rss_bytes, used := _resident(process.pid))
            if self.memory_limit is not None and used > self.memory_limit:
                raise self.failed(
                    f"the {self.task} takes over {self.memory_limit} bytes of memory, the server's limit "
                    "(MOBIZO_COMPILE_BUDGET_BYTES); use a smaller one"
                )
            if not self.keep():
                return False


class _Listener(threading.Thread):
    """Reads the output of the task; `last` is the latest result or error."""

    def __init__(self, lines: IO[bytes] | None, on_stage: Callable[[dict[str, Any]], None], result: str) -> None:
        super().__init__(daemon=True)
        self._lines, self._on_stage, self._result = lines, on_stage, result
        self.last: dict[str, Any] = {}
        self.start()

    def run(self) -> None:
        """Reads until the pipe closes."""
        if self._lines is None:
            return
        with self._lines:
            for line in self._lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    continue
                if not isinstance(message, dict):
                    continue
                if self._result in message or "error" in message:
                    self.last = message
                else:
                    self._on_stage(message)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
