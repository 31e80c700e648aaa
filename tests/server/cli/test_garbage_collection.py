"""`mobizo-server gc` on a home."""

import json
import os

import pytest
from typer.testing import CliRunner

from server.cli import main as cli
from shared.errors import MobizoError, NotFound, Unavailable
from tests.server.s3 import KEY_ID, SECRET


@pytest.fixture
def gc(home, monkeypatch):
    """Runs the command; returns what it printed, or raises what it raised."""
    for name, value in home.settings.environment().items():
        monkeypatch.setenv(name, value)

    def run(*options):
        result = CliRunner().invoke(cli.app, ["gc", *options])
        if isinstance(result.exception, MobizoError):
            raise result.exception
        assert result.exit_code == 0, result.output
        return result.output

    return run


def test_it_tells_and_removes(home, gc):
    orphan = home.artifacts.put(b"12345")
    assert gc("--dry-run", "--grace-hours", "0") == "1 of 2 files (5 bytes) would be removed\n"
    assert json.loads(gc("--json"))["deleted"] == 0  # too young
    found = json.loads(gc("--grace-hours", "0", "--json"))
    assert found == {"files": 2, "deleted": 1, "freed_bytes": 5, "leftovers": 0, "dry_run": False}
    with pytest.raises(NotFound):
        home.artifacts.read(orphan)


def test_what_was_never_whole(home, gc):
    left = home.settings.artifacts_path / "staging" / "tmpabc"
    left.write_bytes(b"half")
    os.utime(left, (0, 0))
    assert gc("--grace-hours", "0") == "0 of 1 files (0 bytes) were removed, and 1 incomplete files\n"


def test_a_store_that_does_not_answer(gc, monkeypatch):
    given = {"URL": "s3://files", "ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY_ID": KEY_ID}
    for name, value in (given | {"SECRET_ACCESS_KEY": SECRET}).items():
        monkeypatch.setenv(f"MOBIZO_STORAGE_{name}", value)
    with pytest.raises(Unavailable, match="object store"):
        gc()
