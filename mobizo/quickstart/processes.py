"""Child processes, such as a server and a device agent, that are stopped together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.errors import BadRequest, MobizoError

BIN = Path(sys.executable).parent
SERVER, AGENT = str(BIN / "mobizo-server"), str(BIN / "mobizo-agent")
USAGE = 2  # exit status of a command whose arguments are wrong
START_SECONDS = 120
STOP_SECONDS = 15
LISTENING_LINE = re.compile(r"listening on \S*?(https?://[\w.:]+)")


class Processes:
    """Processes, each in its own process group. All are stopped at the end of the context."""

    def __init__(self, logs: Path) -> None:
        """logs: directory of their output."""
        self._logs = logs
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        previous_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C would leave processes running
        try:
            self._stop()
        finally:
            signal.signal(signal.SIGINT, previous_handler)

    def _stop(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        for _name, process in reversed(self._processes):  # the agent before the server, which takes its lease back
            _signal_group(process, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            # A child may outlive the group leader, so the whole group is killed.
            _signal_group(process, signal.SIGKILL)
            process.wait()

    def start(
        self, name: str, command: list[str], env: Mapping[str, str], *, pipes: bool = False
    ) -> subprocess.Popen[bytes]:
        """Starts a process whose output goes to a log file with its name.

        pipes: its standard input and output are pipes, and only its errors go to the log.
        """
        # SIGINT is blocked until the process is recorded, so that Ctrl-C cannot leave it running.
        interrupts: list[bool] = []
        previous_handler = signal.signal(signal.SIGINT, lambda *_: interrupts.append(True))
        try:
            with (self._logs / f"{name}.log").open("wb") as log:
                streams: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE} if pipes else {"stdout": log}
                process = subprocess.Popen(command, env=env, stderr=log, start_new_session=True, **streams)
            self._processes.append((name, process))
        finally:
            signal.signal(signal.SIGINT, previous_handler)
        if interrupts:
            raise KeyboardInterrupt
        return process

    def check(self) -> None:
        """Raises MobizoError, with the end of its log, if server or agent have ended."""
        for name, process in self._processes:
            if name in ("server", "agent") and process.poll() is not None:
                tail = self._log(name)[-2000:]
                raise MobizoError(f"{name} ended with status {process.returncode}:\n{tail}")

    def server_url(self) -> str:
        """Waits until the process `server` listens and returns its URL. Raises MobizoError if it does not."""
        deadline = time.monotonic() + START_SECONDS
        while (match := LISTENING_LINE.search(self._log("server"))) is None:
            self.check()
            if time.monotonic() > deadline:
                raise MobizoError(f"the server did not start within {START_SECONDS} seconds")
            time.sleep(0.2)
        return match[1]

    def _log(self, name: str) -> str:
        return (self._logs / f"{name}.log").read_text(errors="replace")


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def run_command(command: list[str], env: Mapping[str, str]) -> str:
    """Returns the output of a command. Raises BadRequest for wrong arguments, MobizoError if it fails otherwise."""
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if result.returncode:
        kind = BadRequest if result.returncode == USAGE else MobizoError
        raise kind(f"`{Path(command[0]).name} {' '.join(command[1:3])}` failed: {result.stderr.strip()[-2000:]}")
    return result.stdout
