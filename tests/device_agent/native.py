"""The real native runner, built once per machine for all tests from the installed `executorch` package."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from device_agent.errors import NoRunner
from device_agent.runner.build import Options, build_locked
from device_agent.runner.location import RunnerLocation, never
from device_agent.runner.toolchain import check_compiler, check_cross_compiler
from device_agent.runtimes import CallingRuntime
from device_agent.runtimes.runner import ServedProgram, serve_command
from shared.errors import Unavailable
from tests.programs import cache_directory

ROOT = Path(__file__).resolve().parents[2]


def tools_on_path(monkeypatch):
    """CMake and Ninja of this Python's environment come before the machine's, which may be too old."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


def kept_runner(system=None):
    """Returns the place of the runner that tests keep across runs. system: its platform; default: this machine's."""
    directory = cache_directory() / "runners"
    directory.mkdir(parents=True, exist_ok=True)
    return RunnerLocation(directory, system)


def built_bundle(target):
    """Copies the kept aarch64 bundle to `target`, built first if its sources have changed; returns `target`.

    Skips without the cross compiler, or where ExecuTorch's wheel cannot be fetched.
    """
    try:
        return built_runner(target, "android-arm64", check_cross_compiler)  # never native, so always the bundle
    except Unavailable as error:
        pytest.skip(error.detail)


def built_runner(target, system=None, check=check_compiler):
    """Copies the kept runner to `target`, built first if its sources have changed; returns `target`."""
    try:
        check()
    except NoRunner as error:
        pytest.skip(error.detail)
    place = kept_runner(system)
    with pytest.MonkeyPatch.context() as monkeypatch:
        tools_on_path(monkeypatch)
        # Whoever comes meanwhile waits, and builds nothing. A copy: another session's sources may differ.
        with place.lock():
            source = place.find() or build_locked(place, print, Options(), never)
            shutil.copytree(source, target)
    return target


class RunnerRuntime(CallingRuntime):
    """The `Runtime` contract over `mobizo-runner serve`, to test the runner's calls one by one."""

    def __init__(self, manifest, runner, program, weights):
        """runner: the directory of the runner. B is zero."""
        super().__init__(manifest)
        self._served = ServedProgram(serve_command(runner, program, weights), "the program")

    def _call(self, method, inputs):
        return self._served.call(method, inputs)

    def close(self):
        self._served.close()
