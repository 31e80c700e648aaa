"""The compiler as a child process: started, listened to, stopped. Knows no database and no torch.

Its command gets a recipe file, the base's source and an output directory. It prints one JSON object a line: stages as
it goes, then {"manifest": ...}, or {"error": {"code", "detail"}} and exit code 1. Anything else is a crash.
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
from pathlib import Path
from typing import IO, Any

import psutil  # type: ignore[import-untyped]  # the package ships no types
import pydantic
import structlog

from server.tether import tethered
from shared.errors import CompileFailed, MobizoError, from_problem
from shared.program import ProgramManifest
from shared.recipe import Recipe

_log = structlog.get_logger()


class CompilerCrashed(CompileFailed):
    """The compiler died without saying why; the server's log has its output."""


@dataclass(frozen=True)
class Stopped:
    """The compilation was ended because it was not wanted any more."""


def _log_stage(said: dict[str, Any]) -> None:
    _log.info("compiling", said=said)


@dataclass
class CompilerProcess:
    """One compilation. `keep` is asked every `interval` seconds whether to go on; `hear` is told the stages.

    log: takes what the compiler and its libraries print besides; None: this process's standard error.
    """

    command: list[str]
    interval: float
    memory_limit: int | None
    keep: Callable[[], bool]
    hear: Callable[[dict[str, Any]], None] = _log_stage
    log: IO[bytes] | None = None
    peak_rss_bytes: int = 0

    def run(self, recipe: Recipe, source: str, workspace: Path) -> ProgramManifest | Stopped:
        """Compiles into `workspace`/program; no process is left when it returns or raises.

        Raises the error that the compiler reports, CompilerCrashed, or CompileFailed if it takes too much memory.
        """
        recipe_path = workspace / "recipe.json"
        recipe_path.write_text(recipe.model_dump_json(), encoding="utf-8")
        arguments = [str(recipe_path), source, str(workspace / "program")]
        # A session of its own, so that all it may start can be killed at once.
        process = subprocess.Popen(
            tethered([*self.command, *arguments]),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            start_new_session=True,
        )
        said = _Listener(process.stdout, self.hear)
        try:
            if not self._watch(process):
                return Stopped()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said.join()
        return _manifest(said.last, process.returncode, recipe)

    def _watch(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for the end; False if it is not wanted before. Raises CompileFailed over the memory limit."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.interval)
                return True
            self.peak_rss_bytes = max(self.peak_rss_bytes, used := _resident(process.pid))
            if self.memory_limit is not None and used > self.memory_limit:
                raise CompileFailed(
                    f"the compilation takes over {self.memory_limit} bytes of memory, the server's limit "
                    "(MOBIZO_COMPILE_MEMORY_BYTES); use a smaller recipe"
                )
            if not self.keep():
                return False


class _Listener(threading.Thread):
    """Reads what the compiler says to the end; `last` is the latest manifest or error."""

    def __init__(self, lines: IO[bytes] | None, hear: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(daemon=True)
        self._lines, self._hear = lines, hear
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
                if "manifest" in message or "error" in message:
                    self.last = message
                else:
                    self._hear(message)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def _manifest(said: dict[str, Any], exit_code: int, recipe: Recipe) -> ProgramManifest:
    if "error" in said:
        raise _reported(said["error"])
    if "manifest" not in said or exit_code != 0:
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
        raise CompilerCrashed(f"the compiler ended {how} before it was done; the server's log has its output")
    try:
        manifest = ProgramManifest.model_validate(said["manifest"])
    except pydantic.ValidationError as error:
        raise CompileFailed("the compiler's manifest is not of the agreed form") from error
    if manifest.recipe_id != recipe.id or manifest.recipe.id != recipe.id:
        raise CompileFailed("the compiler made a program of another recipe")
    return manifest


def _reported(error: Any) -> MobizoError:
    return from_problem(error) if isinstance(error, dict) else CompileFailed()
