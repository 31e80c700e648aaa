"""The native runner is built where neither ExecuTorch nor a new CMake is installed: from wheels, which do not stay.

Needs the package index; downloads 47 MB.
"""

import json
import os
import shutil
import site
import subprocess
import sys

import pytest

from device_agent.runner.location import RunnerLocation
from tests.device_agent.conftest import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

COMPILER = ("c++", "g++", "cc", "gcc", "as", "ld", "ar", "nm", "ranlib", "strip", "objdump", "sh")
BUILD = """
import sys, importlib.util
from pathlib import Path
from device_agent.runner.supply import build_runner_command
assert importlib.util.find_spec("executorch") is None and importlib.util.find_spec("torch") is None
build_runner_command(Path(sys.argv[1]), None, None, None, Path(sys.argv[2]), True)
assert not any(name.split(".")[0] in ("torch", "executorch", "pandas") for name in sys.modules)
"""


@pytest.fixture
def bare(tmp_path):
    """The environment of a Python without torch and ExecuTorch, with a compiler, an old CMake and no build program."""
    packages, programs = tmp_path / "packages", tmp_path / "programs"
    packages.mkdir()
    programs.mkdir()
    for installed in site.getsitepackages():
        for entry in os.scandir(installed):
            if not entry.name.startswith(("executorch", "torch", "cmake", "ninja")):
                (packages / entry.name).symlink_to(entry.path)
    for name in COMPILER:
        if path := shutil.which(name):
            (programs / name).symlink_to(path)
    (programs / "cmake").write_text("#!/bin/sh\necho 'cmake version 3.22.1'\n")
    (programs / "cmake").chmod(0o755)
    return os.environ | {"PATH": str(programs), "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT)))}


@pytest.fixture
def index(tmp_path):
    """Skips unless pip can fetch the smallest of the wheels."""
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet", "--dest", tmp_path / "probe"]
    process = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "ninja"], capture_output=True, check=False
    )
    if process.returncode != 0:
        pytest.skip(f"no package index can be reached from here: {process.stderr.decode()[-200:]}")


@pytest.mark.usefixtures("index")
def test_a_runner_is_built_from_wheels_and_only_its_libraries_stay(bare, tmp_path):
    home, archive = tmp_path / "home", tmp_path / "runner.tar.gz"
    # Without site: then the packages are those above alone.
    command = [sys.executable, "-S", "-W", "error", "-c", BUILD, str(home), str(archive)]
    process = subprocess.run(command, env=bare, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    messages = [json.loads(line) for line in process.stdout.splitlines()]
    packages = [line["progress"].split()[1] for line in messages[:-1] if line["progress"].startswith("fetching")]
    assert packages == ["executorch", "cmake", "ninja"]
    place = RunnerLocation.within(home)
    assert messages[-1]["runner"] == str(place.path)
    sizes = {path.relative_to(home).as_posix(): path.stat().st_size for path in home.rglob("*") if path.is_file()}
    assert sum(sizes.values()) < 20e6
    assert {path.name for path in place.directory.iterdir()} == {place.path.name, "lock", "build.log"}
    assert {path.suffix for path in place.path.rglob("*") if path.is_file()} == {"", ".so"}
    assert place.find() == place.path, "it does not start once what it was built with is gone"
    assert archive.stat().st_size < 10e6
