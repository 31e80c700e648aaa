"""Executors on this machine by `mobizo-runner`, which needs no Python packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from device_agent.executors.process import Launcher
from device_agent.runner.location import PROGRAM
from shared.program import ProgramManifest


class RunnerLauncher(Launcher):
    """Starts `mobizo-runner serve` for each program."""

    name = "native"

    def __init__(self, directory: Path) -> None:
        """directory: of `mobizo-runner` and its libraries."""
        self._directory = directory

    def command(
        self, manifest: ProgramManifest, program: Path, weights: Path, resident: bool, stop: Callable[[], bool]
    ) -> list[str]:
        """Returns the command of the runner. Packed weights are kept beside the weights file."""
        return [str(self._directory / PROGRAM), *serve_options(str(program), str(weights), resident=resident)]


def serve_options(program: str, weights: str, *, resident: bool) -> list[str]:
    """Returns the arguments of `mobizo-runner` that serve a program."""
    files = ["--program", program, "--weights", weights, "--packed", f"{weights}.packed"]
    return ["serve", *files, *(["--resident"] if resident else [])]
