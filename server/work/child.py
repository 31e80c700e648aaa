"""A worker's heavy task as a child process: started, listened to, stopped. Knows no database and no task.

Its command prints one JSON object a line: stages as it goes, then its result, or {"error": {"code", "detail"}} and exit
code 1. Anything else is a crash.
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

import psutil  # type: ignore[import-untyped]  # the package ships no types
import structlog

from server.tether import tethered
from shared.errors import MobizoError, from_problem

_log = structlog.get_logger()


@dataclass(frozen=True)
class Stopped:
    """The task was ended because it was not wanted any more."""


def _log_stage(said: dict[str, Any]) -> None:
    _log.info("working", said=said)


@dataclass
class ChildProcess:
    """One task. `keep` is asked every `interval` seconds whether to go on; `hear` is told the stages.

    log: takes what the task and its libraries print besides; None: this process's standard error.
    """

    task: ClassVar[str]  # what it is called
    result: ClassVar[str]  # the member of its last line
    failed: ClassVar[type[MobizoError]]  # what is raised where it ends badly
    crashed: ClassVar[type[MobizoError]]  # the same, where it does not say why

    command: list[str]
    interval: float
    memory_limit: int | None
    keep: Callable[[], bool]
    hear: Callable[[dict[str, Any]], None] = _log_stage
    log: IO[bytes] | None = None
    peak_rss_bytes: int = 0

    def listen(self, arguments: list[str]) -> Any | Stopped:
        """Runs it and returns its result; no process is left when it returns or raises.

        Raises the error that it reports, `crashed`, or `failed` if it takes too much memory.
        """
        # A session of its own, so that all it may start can be killed at once.
        process = subprocess.Popen(
            tethered([*self.command, *arguments]),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,
        )
        said = _Listener(process.stdout, self.hear, self.result)
        try:
            if not self._watch(process):
                return Stopped()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.join()
        if "error" in said.last:
            error = said.last["error"]
            raise from_problem(error) if isinstance(error, dict) else self.failed()
        if self.result not in said.last or process.returncode != 0:
            code = process.returncode
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise self.crashed(f"the {self.task} ended {how} before it was done; the server's log has its output")
        return said.last[self.result]

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end; False if it is not wanted before. Raises `failed` over the memory limit."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.interval)
                return True
            self.peak_rss_bytes = max(self.peak_rss_bytes, used := _resident(process.pid))
            if self.memory_limit is not None and used > self.memory_limit:
                raise self.failed(
                    f"the {self.task} takes over {self.memory_limit} bytes of memory, the server's limit "
                    "(MOBIZO_COMPILE_MEMORY_BYTES); use a smaller one"
                )
            if not self.keep():
                return False


class _Listener(threading.Thread):
    """Reads what the task says to the end; `last` is the latest result or error."""

    def __init__(self, lines: IO[bytes] | None, hear: Callable[[dict[str, Any]], None], result: str) -> None:
        super().__init__(daemon=True)
        self._lines, self._hear, self._result = lines, hear, result
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
                    self._hear(message)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
