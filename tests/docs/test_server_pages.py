"""docs/operations.md and docs/dashboard.md: their blocks for one host run as they stand, in a home of their own."""

import re

import pytest

from tests.docs.test_commands import plain_environment, run_script, shown
from tests.server.llama import write_llama

PAGES = ("docs/operations.md", "docs/dashboard.md")
RUNS = re.compile(r"^mobizo-server run\b.*$", re.MULTILINE)  # until somebody stops it


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
    (tmp_path / "backup").mkdir()
    (tmp_path / "var").mkdir()
    done = run_script(script, tmp_path, plain_environment() | {"MOBIZO_HOME": str(tmp_path / "home")})
    assert "mobizo-operator-" in done.stdout
    assert (tmp_path / "backup" / "2026-11-21" / "mobizo.sqlite3").exists()
    assert (tmp_path / "var" / "restored" / "keys").is_dir()
