"""The wheels in an environment of their own: without a compiler, torch and ExecuTorch, the agent trains and predicts.

Needs the package index, for the agent's dependencies.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import version

import pytest

from device_agent.runner.location import EXECUTORCH
from tests.device_agent.native import ROOT, built_wheels
from tests.test_wheel import wheel

__all__ = ["wheel"]  # a fixture

FACTS = """
import importlib.util, json
from device_agent.runner.location import find_runner
print(json.dumps([str(find_runner()), [name for name in ("torch", "executorch") if importlib.util.find_spec(name)]]))
"""


@pytest.fixture
def index(tmp_path):
    """Skips unless pip can fetch a small package."""
    options = ["--no-deps", "--only-binary", ":all:", "--quiet", "--dest", tmp_path / "probe"]
    command = [sys.executable, "-m", "pip", "download", *options, "rfc8785"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        pytest.skip(f"no package index can be reached from here: {process.stderr[-200:]}")


@pytest.fixture
def programs(index, wheel, tmp_path):
    """The directory of a new environment's programs, where `mobizo[agent]` is installed from a directory of wheels."""
    runner = built_wheels(tmp_path / "wheels", platform.machine())
    assert set(runner) == {("mobizo_runner", f"manylinux_2_28_{platform.machine()}")}
    (tmp_path / "wheels" / wheel.name).hardlink_to(wheel)
    venv.create(tmp_path / "venv", with_pip=True)
    options = ["--quiet", "--constraint", ROOT / "constraints.txt", "--find-links", tmp_path / "wheels"]
    subprocess.run([tmp_path / "venv" / "bin" / "pip", "install", *options, "mobizo[agent]"], check=True)
    return tmp_path / "venv" / "bin"


@pytest.mark.slow
def test_the_agent_trains_and_predicts_without_a_compiler(programs, server, enrolled, rademacher, dataset, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MOBIZO_AGENT_RUNNER")}
    env |= {"PATH": str(programs), "MOBIZO_AGENT_HOME": str(enrolled.path)}

    def run(*command, **options):
        process = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False, **options)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    runner, others = json.loads(run(programs / "python", "-c", FACTS))
    assert runner.startswith(f"{programs.parent}/")
    assert others == []
    server.add_job(rademacher, steps=10, evaluation_interval=5)
    run(programs / "mobizo-agent", "run", "--once", "--data", f"movies={dataset}")
    assert server.completions[0].result.steps == 10
    assert len(server.uploads) == 1
    answer = json.loads(run(programs / "mobizo-agent", "predict", "alice-movies", "--json", input="it was\n"))
    assert {candidate["text"] for candidate in answer["candidates"]} == {" terrible", " great"}


def test_the_versions_agree():
    """Of the runner's package, and of ExecuTorch where it is pinned, downloaded and expected."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, name in (("agent", "mobizo-runner"), ("phone", "mobizo-runner-phone")):
        (requirement,) = [text for text in extras[extra] if re.match(rf"{name}==", text)]
        assert requirement.partition(";")[0] == f"{name}=={version('mobizo')}"
    assert f"executorch=={EXECUTORCH}\n" in (ROOT / "constraints.txt").read_text()
    assert f"executorch=={EXECUTORCH} --hash" in (ROOT / "deploy" / "runner_wheel.py").read_text()
