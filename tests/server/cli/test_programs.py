"""`mobizo-server program`: what it lists, and compiling anew."""

import json

import pytest

from shared.errors import NotFound


def test_list_and_recompile(fleet, home, app, command):
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


def test_a_program_that_is_none(command):
    with pytest.raises(NotFound, match="program list"):
        command("program", "recompile", "0" * 64)
