"""The real native runner, built once per machine for all tests from the installed `executorch` package."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from device_agent.errors import NoRunner
from device_agent.runner_build import Options, build_locked
from device_agent.runner_place import RunnerPlace, never
from device_agent.runner_tools import check_compiler

ROOT = Path(__file__).resolve().parents[2]


def tools_on_path(monkeypatch):
    """CMake and Ninja of this Python's environment come before the machine's, which may be too old."""
    monkeypatch.setenv("PATH", os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


def built_runner(cache, target):
    """A copy at `target` of the runner in pytest's cache, built there first if its sources have changed."""
    try:
        check_compiler()
    except NoRunner as error:
        pytest.skip(error.detail)
    place = RunnerPlace(cache.mkdir("runners"))
    with pytest.MonkeyPatch.context() as monkeypatch:
        tools_on_path(monkeypatch)
        # Whoever comes meanwhile waits, and builds nothing. A copy: another session's sources may differ.
        with place.lock():
            found = place.find() or build_locked(place, print, Options(), never)
            shutil.copytree(found, target)
    return target
