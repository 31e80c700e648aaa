"""The native runner that `make setup` installed, its wheels, and its calls one by one."""

import subprocess
import sys
from pathlib import Path

import pytest

from device_agent.errors import NoRunner
from device_agent.executors.program import TrainingProgram
from device_agent.executors.runner import RunnerLauncher
from device_agent.runner.location import find_runner
from tests.programs import held

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "device_agent" / "runner"


def built_runner():
    """Returns the directory of the installed runner. Skips where none is installed."""
    try:
        return find_runner()
    except NoRunner as error:
        pytest.skip(error.detail)


def built_wheels(directory, *machines):
    """Builds the runner's wheels for these machines, by default for all that this one can compile for.

    What was compiled before is used again. Returns the wheels by distribution and tag.
    """
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    options = [option for machine in machines for option in ("--machine", machine)]
    with held(build / "lock"):  # of other processes that test
        command = [sys.executable, ROOT / "deploy" / "runner_wheel.py", directory, *options]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return {(path.name.split("-")[0], path.stem.split("-")[-1]): path for path in directory.glob("*.whl")}


def opened_by_runner(manifest, runner, program, weights):
    """Returns a program that the runner in the directory `runner` has loaded, to test its calls one by one."""
    return TrainingProgram(manifest, RunnerLauncher(runner).launch(manifest, program, weights))
