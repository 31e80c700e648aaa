"""The wheel: all files but the native runner's sources, and programs that start in an environment of their own."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNNER_SOURCE = re.compile(r"device_agent/runner/.*(?<!\.py)$")
PACKAGES = ("device_agent", "mobizo", "server", "shared", "simulation")


def tracked():
    """The files in git's index, and new ones that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of the tracked files by the build back end that is installed."""
    root = tmp_path_factory.mktemp("wheel")
    for name in tracked():
        if name.split("/")[0] in PACKAGES or "/" not in name or name.startswith("examples/data/LICENSE"):
            (root / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run(
        [*command, "--wheel-dir", root, root / "source"], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = root.glob("*.whl")
    return built


@pytest.mark.slow
def test_it_has_every_file_of_the_packages_and_the_licences(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    own = {name for name in tracked() if name.split("/")[0] in PACKAGES and not RUNNER_SOURCE.match(name)}
    assert sorted(own - packed) == []
    assert {name.split("/")[0] for name in packed} == {*PACKAGES, f"mobizo-{version('mobizo')}.dist-info"}
    licences = {name.split("licenses/")[-1] for name in packed if "/licenses/" in name}
    assert licences >= {"LICENSE", "examples/data/LICENSE-vaderSentiment.txt"}


@pytest.mark.slow
def test_the_programs_start_from_an_installation(wheel, tmp_path):
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    # Its dependencies are those of this environment, behind the wheel's own packages.
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    programs = {"mobizo": "mobizo.cli", "mobizo-agent": "device_agent.cli.main", "mobizo-server": "server.cli.main"}
    for program, module in programs.items():
        code = (
            f"import sys, {module} as found; sys.argv = [{program!r}, '--version']; print(found.__file__); found.main()"
        )
        command = [python, "-W", "ignore", "-c", code]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
        where, told = done.stdout.splitlines()
        assert Path(where).is_relative_to(packages), where
        assert told == f"mobizo {version('mobizo')}"
