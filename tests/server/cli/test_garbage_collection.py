"""`mobizo-server gc` on a home."""

import json

import pytest

from shared.errors import NotFound, Unavailable
from tests.server.s3 import KEY_ID, SECRET


def test_it_tells_and_removes(home, command):
    orphan = home.artifacts.put(b"12345")
    assert command("gc", "--dry-run", "--grace-hours", "0") == "1 of 2 files (5 bytes) would be removed\n"
    assert json.loads(command("gc", "--json"))["deleted"] == 0  # too young
    report = json.loads(command("gc", "--grace-hours", "0", "--json"))
    assert report == {"files": 2, "deleted": 1, "freed_bytes": 5, "dry_run": False}
    with pytest.raises(NotFound):
        home.artifacts.read(orphan)


def test_a_store_that_does_not_answer(command, monkeypatch):
    settings = {"URL": "s3://files", "ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY_ID": KEY_ID}
    for name, value in (settings | {"SECRET_ACCESS_KEY": SECRET}).items():
        monkeypatch.setenv(f"MOBIZO_STORAGE_{name}", value)
    with pytest.raises(Unavailable, match="object store"):
        command("gc")
