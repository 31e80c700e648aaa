"""The real native runner, built once per machine for all tests from the installed `executorch` package."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from device_agent.errors import NoRunner
from device_agent.runner_build import build_runner
from device_agent.runner_place import RunnerPlace
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
        found = place.find() or build_runner(place, print)
    # A copy: another test session may build other sources meanwhile, and then these go.
    shutil.copytree(found, target)
    return target
