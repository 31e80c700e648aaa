"""The native runner is built from its sources: what it links, what stays, and what is said when it cannot be."""

import json
import shutil
import subprocess
from importlib.metadata import version


def test_the_runner_is_built_and_starts_wherever_it_is_moved(runner_directory, tmp_path):
    moved = tmp_path / "elsewhere" / "runner"
    shutil.copytree(runner_directory, moved)
    done = subprocess.run([moved / "mobizo-runner", "version"], capture_output=True, text=True, check=True, env={})
    assert json.loads(done.stdout)["version"] == version("mobizo")
