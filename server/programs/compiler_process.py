"""The compiler as a child process, so that this process does not import torch.

Its arguments are a recipe file, the base's source, an output directory and, if the recipe names one, a calibration. It
prints one JSON object per line: stages while it runs, then {"manifest": ...}, or {"error": {"code", "detail"}} and exit
code 1. Any other end is a crash.
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

import psutil
import pydantic
import structlog

from server.compiler.worker_protocol import LOWERED
from server.tasks.child_process import ONE_THREAD, Stopped, bound_to_parent
from shared.errors import CompileFailed, from_problem
from shared.program import ProgramManifest
from shared.recipe import Recipe

CALIBRATION = "calibration.safetensors"
RESULT = "manifest"


class CompilerCrashed(CompileFailed, code=CompileFailed.code, title=CompileFailed.title):
    """The compiler died without saying why; the server's log has its output."""


_log = structlog.get_logger()


def _log_stage(stage: dict[str, Any]) -> None:
    _log.info("working", stage=stage)


@dataclass
class CompilerProcess:
    """One compilation.

    keep: called every `interval` seconds; returns whether it continues. on_stage: called with each stage. log: receives
    all other output of the compiler and its libraries; None: this process's standard error. lowered: directory of what
    earlier compilations lowered; None: this one begins anew.
    """

    command: list[str]
    interval: float
    memory_limit: int | None
    keep: Callable[[], bool]
    on_stage: Callable[[dict[str, Any]], None] = _log_stage
    log: IO[bytes] | None = None
    lowered: Path | None = None
    peak_rss_bytes: int = 0

    def run(self, recipe: Recipe, source: str, workspace: Path, calibration: bytes | None = None) -> ProgramManifest:
        """Compiles into `workspace`/program; no process is left when it returns or raises.

        calibration: the file of the calibration that the recipe names, if any.

        Raises the error that the compiler reports, CompilerCrashed, CompileFailed if it takes too much memory, or
        Stopped.
        """
        recipe_path = workspace / "recipe.json"
        recipe_path.write_text(recipe.model_dump_json(), encoding="utf-8")
        calibration_argument = []
        if calibration is not None:
            (workspace / CALIBRATION).write_bytes(calibration)
            calibration_argument = [str(workspace / CALIBRATION)]
        result = self._listen([str(recipe_path), source, str(workspace / "program"), *calibration_argument])
        try:
            manifest = ProgramManifest.model_validate(result)
        except pydantic.ValidationError as error:
            raise CompileFailed("the compiler returned an invalid manifest") from error
        if manifest.recipe_id != recipe.id or manifest.recipe.id != recipe.id:
            raise CompileFailed("the compiler returned a program of another recipe")
        return manifest

    def _listen(self, arguments: list[str]) -> Any:
        """Runs the compiler and returns the manifest as JSON."""
        # A separate session, so that all processes that it starts can be killed at once.
        process = subprocess.Popen(
            bound_to_parent([*self.command, *arguments]),
            stdout=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            stderr=self.log,
            env=ONE_THREAD | os.environ | ({} if self.lowered is None else {LOWERED: str(self.lowered)}),
            start_new_session=True,
        )
        output = _Listener(process.stdout, self.on_stage)
        try:
            self._watch(process)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            output.join()
        if "error" in output.last:
            error = output.last["error"]
            raise from_problem(error) if isinstance(error, dict) else CompileFailed()
        if RESULT not in output.last or process.returncode != 0:
            code = process.returncode
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            raise CompilerCrashed(f"the compilation ended {how} before it was done; the server's log has its output")
        return output.last[RESULT]

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        """Waits for the end. Raises Stopped if the compiler is to stop, CompileFailed over the memory limit."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.interval)
                return
            self.peak_rss_bytes = max(self.peak_rss_bytes, used := _resident(process.pid))
            if self.memory_limit is not None and used > self.memory_limit:
                raise CompileFailed(
                    f"the compilation takes over {self.memory_limit} bytes of memory, the server's limit "
                    "(MOBIZO_COMPILE_BUDGET_BYTES); use a smaller one"
                )
            if not self.keep():
                raise Stopped


class _Listener(threading.Thread):
    """Reads the output of the compiler; `last` is the latest result or error."""

    def __init__(self, lines: IO[bytes] | None, on_stage: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(daemon=True)
        self._lines, self._on_stage = lines, on_stage
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
                if RESULT in message or "error" in message:
                    self.last = message
                else:
                    self._on_stage(message)


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0
