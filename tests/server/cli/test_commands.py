"""`mobizo-server key`, `gc` and `program` on a home."""

import json

import pytest

from server.identity.signing_keys.service import KeyFiles, load_key
from shared.errors import BadRequest, NotFound, Unavailable
from shared.signing import key_id
from tests.server.s3 import KEY_ID, SECRET


def test_keys_from_one_to_the_next_and_the_last(command, home, fleet, device):
    path = home.settings.key_path
    first = key_id(load_key(path).public_key())
    (row,) = json.loads(command("key", "list", "--json"))
    assert (row["id"], row["state"], row["private_key"]) == (first, "current", "present")
    rotation = json.loads(command("key", "rotate", "--json"))
    second = key_id(load_key(path).public_key())
    assert rotation == {"before": first, "after": second, "signed": 0, "adapter_versions": 0, "devices_shut_out": 0}
    keys = [(row["id"], row["state"], row["private_key"]) for row in json.loads(command("key", "list", "--json"))]
    assert keys == [(first, "former", "present"), (second, "current", "present")]
    assert json.loads(command("key", "retire", "--json")) == {"retired": [first]}
    with pytest.raises(BadRequest, match="nothing was changed"):
        command("key", "rotate", "--compromised", typed="n\n")
    text = command("key", "rotate", "--compromised", "--yes")
    third = key_id(load_key(path).public_key())
    assert f"{second} is destroyed and no longer trusted; 1 devices must enroll again" in text
    rows = json.loads(command("key", "list", "--json"))
    assert [(row["id"], row["state"], row["private_key"]) for row in rows] == [
        (first, "compromised", "absent"),
        (second, "compromised", "absent"),
        (third, "current", "present"),
    ]
    assert rows[0]["retired_at"]
    assert KeyFiles(path).former_ids() == []
    assert fleet.actor().get("/v1/server/keys").json()["rotations"] == []


def test_gc_tells_and_removes(home, command):
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


def test_programs_are_listed_and_recompiled(fleet, home, app, command):
    job = fleet.ready_job(app)
    other = app.submit(adapter="other", recipe={"rank": 3})
    rows = json.loads(command("program", "list", "--json"))
    assert [(row["recipe_id"], row["state"], row["version"]) for row in rows] == [
        (other["recipe_id"], "pending", None),
        (job["recipe_id"], "ready", 1),
    ]
    assert rows[0]["base"] == "tiny"
    assert "version 2" in command("program", "recompile", job["recipe_id"])
    assert job["recipe_id"] in command("program", "list")
    home.compile()
    rows = json.loads(command("program", "list", "--json", "--limit", "5"))
    assert {row["recipe_id"]: row["version"] for row in rows} == {job["recipe_id"]: 2, other["recipe_id"]: 1}
    assert len(json.loads(command("program", "list", "--json", "--limit", "1"))) == 1
