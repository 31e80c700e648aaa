"""The commands that show and change adapters and versions, against a real server."""

import json
from functools import partial

import pytest

NAME = "alice-movies"


@pytest.fixture
def call(command):
    return partial(command, "adapter")


@pytest.fixture
def publish(fleet, app, device):
    """Adds a version whose accuracy on the device rose from 50 % to `accuracy`, and returns it."""

    def publish(accuracy, value=0.5):
        fleet.ready_job(app)
        return device.finish(device.lease(), value, tuned_accuracy=accuracy)

    return publish


@pytest.fixture
def three_versions(publish):
    """Three versions: v1 and v2 approved, v3 held because its score is lower."""
    return [publish(0.75), publish(0.8, 0.25), publish(0.4)]


def main_of(call):
    return json.loads(call("list", "--json"))[0]["main"]


def test_lists_and_cards(call, three_versions):
    versions = json.loads(call("versions", NAME, "--json"))
    assert [(item["version"], item["state"]) for item in versions] == [(3, "held"), (2, "approved"), (1, "approved")]
    assert [item["version"] for item in json.loads(call("versions", NAME, "--state", "held", "--json"))] == [3]
    table = call("versions", NAME)
    assert all(item["revision"][:12] in table for item in three_versions)
    assert "80.0%" in table
    assert NAME in call("list")
    assert f"{NAME}, version 1 |" in call("card", f"{NAME}@v1")
    assert call("card", NAME) == call("card", f"{NAME}@{three_versions[1]['revision'][:9]}")
    assert "held" in call("events", NAME)
    assert json.loads(call("events", NAME, "--json"))[0]["action"] == "held"


def test_views(call, three_versions):
    output = call("view", NAME)
    assert f"{NAME}: 3 versions, user alice" in output
    assert "main: v2" in output
    assert json.loads(call("view", NAME, "--json"))["main"] == 2
    assert "v1" in call("view", f"{NAME}@v1")
    assert json.loads(call("view", f"{NAME}@v1", "--json"))["revision"] == three_versions[0]["revision"]


def test_promote_and_approve(call, three_versions):
    assert main_of(call) == 2
    assert "main v1" in call("promote", f"{NAME}@v1")
    assert json.loads(call("promote", f"{NAME}@v2", "--reason", "it was better", "--json"))["main"] == 2
    assert "v3" in call("approve", f"{NAME}@{three_versions[2]['revision']}")
    assert main_of(call) == 3
    assert json.loads(call("events", NAME, "--json"))[1]["reason"] == "it was better"


REFUSED = [
    (["view", "nobody"], 1, "nobody"),
    (["view", f"{NAME}@v7"], 1, "v7"),
    (["promote", f"{NAME}@v3"], 1, "held"),
    (["promote", f"{NAME}@v9"], 1, "v9"),
    (["promote", NAME], 2, f"{NAME}@REVISION"),
    (["promote", "nobody@v1"], 1, "nobody"),
    (["promote", "../jobs@v1"], 1, "../jobs"),
    (["promote", f"{NAME}@none"], 1, "none"),
    (["compare", f"{NAME}@v1", f"{NAME}@../x"], 1, "../x"),
    (["undelete", f"{NAME}@best"], 2, f"undelete {NAME}@v3"),
    (["pull", f"{NAME}@v7", "--to", "x"], 1, "v7"),
    (["card", f"{NAME}@.."], 1, ".."),
]


def test_errors_are_one_line(call, three_versions):
    for arguments, code, expected in REFUSED:
        message = call(*arguments, exit_code=code)
        assert expected in message, arguments
        assert len(message.splitlines()) == 1, arguments
