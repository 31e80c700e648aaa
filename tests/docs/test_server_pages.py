"""docs/operations.md and docs/dashboard.md: their blocks for one host run as they stand, in a home of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_commands import FENCE, NOT_RUN, ROOT
from tests.server.llama import write_llama

PAGES = ("docs/operations.md", "docs/dashboard.md")
RUNS = re.compile(r"^mobizo-server run\b.*$", re.MULTILINE)  # until somebody stops it


def shown(page):
    """The blocks of a page that are to run."""
    for block in FENCE.finditer((ROOT / page).read_text()):
        if not NOT_RUN.search(block["before"]):
            yield block["text"]


@pytest.mark.slow
def test_commands_of_the_server_run_as_they_stand(tmp_path):
    write_llama(tmp_path / "source")
    text = "\n".join(block for page in PAGES for block in shown(page))
    assert len(RUNS.findall(text)) == 2
    places = {
        "/backup": f"{tmp_path}/backup",
        "/var/lib/mobizo": f"{tmp_path}/var",
        "NAME SOURCE": "tiny source",
        "check SOURCE": "check source",
    }
    for place, here in places.items():
        assert place in text
        text = text.replace(place, here)
    script = RUNS.sub("mobizo-server run --port 0 > run.log & sleep 0.1", text)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MOBIZO_")}
    env |= {"MOBIZO_HOME": str(tmp_path / "home"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (tmp_path / "backup").mkdir()
    (tmp_path / "var").mkdir()
    stop = "trap 'kill $(jobs -p) || true' EXIT"
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; {stop}\n{script}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mobizo-operator-" in done.stdout
    assert (tmp_path / "backup" / "2026-11-21" / "mobizo.sqlite3").exists()
    assert (tmp_path / "var" / "restored" / "keys").is_dir()
