"""The commands that show and change adapters and versions, against a real server."""

import json
from functools import partial

import pytest

from mobizo import Client
from shared.registry import ApprovalRule

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


def test_promote_rollback_and_approve(call, three_versions):
    assert main_of(call) == 2
    assert "main v1" in call("promote", f"{NAME}@v1")
    assert "main v2" in call("rollback", NAME, "--reason", "the old one was better")
    assert json.loads(call("rollback", f"{NAME}@v1", "--json"))["main"] == 1
    assert "v3" in call("approve", f"{NAME}@{three_versions[2]['revision']}")
    assert main_of(call) == 3
    assert json.loads(call("events", NAME, "--json"))[2]["reason"] == "the old one was better"


def test_tags(call, three_versions):
    assert call("tags", NAME) == "main\tv2\n"
    assert "best v1" in call("tag", f"{NAME}@v1", "best")
    assert json.loads(call("tags", NAME, "--json")) == {"main": 2, "best": 1}
    assert "best" in call("versions", NAME)
    call("tag", NAME, "best")
    assert json.loads(call("tags", NAME, "--json"))["best"] == 2
    call("untag", NAME, "best")
    assert call("tags", NAME) == "main\tv2\n"


def test_compare(call, three_versions):
    comparison = json.loads(call("compare", f"{NAME}@v1", "--json"))
    assert (comparison["left"]["version"], comparison["right"]["version"]) == (1, 2)
    assert comparison["weights"]["cosine"] == pytest.approx(1)
    output = call("compare", f"{NAME}@v1", f"{NAME}@v2")
    assert "tuned_accuracy: 0.75 -> 0.8 (+0.05)" in output
    assert "cosine 1.0000" in output


def test_deprecate_reject_delete_and_undelete(call, three_versions):
    assert "too old" in call("deprecate", f"{NAME}@v2", "--message", "too old")
    assert main_of(call) == 1
    assert "can be restored until" in call("reject", f"{NAME}@v3")
    call("delete", f"{NAME}@v1")
    assert {item["state"] for item in json.loads(call("versions", NAME, "--json"))} == {"deprecated", "deleted"}
    assert "approved" in call("undelete", f"{NAME}@v1")
    assert "nothing was deleted" in call("delete", NAME, stdin="n\n", exit_code=1)
    call("delete", NAME, "--yes")
    assert json.loads(call("list", "--json")) == []
    assert NAME in call("list", "--deleted")
    call("undelete", NAME)
    assert main_of(call) == 1


def test_approval_rules(fleet, app, publish):
    publish(0.75)
    with Client(fleet.url, app.token) as client:
        assert client.approval_rules.get(NAME).source == "server"
        client.approval_rules.set(ApprovalRule(automatic=False))
        assert (client.approval_rules.get(NAME).source, client.approval_rules.get().rule.automatic) == ("tenant", False)
        client.approval_rules.set(ApprovalRule(margin=0.1), NAME)
        assert client.approval_rules.get(NAME).rule.margin == 0.1
        client.approval_rules.set(None, NAME)
        client.approval_rules.set(None)
        assert client.approval_rules.get(NAME).source == "server"


def test_grants(call, fleet, app, three_versions):
    other = fleet.device(name="tablet")
    with Client(fleet.url, app.token) as client:
        assert f"{other.device_id} may download {NAME}" in call("grant", NAME, other.device_id)
        assert [grant.device_id for grant in client.adapter_grants.list(NAME)] == [other.device_id]
        assert f"{other.device_id} may no longer download {NAME}" in call("revoke", NAME, other.device_id)
        assert list(client.adapter_grants.list(NAME)) == []
    assert "device_none" in call("grant", NAME, "device_none", exit_code=1)


REFUSED = [
    (["view", "nobody"], 1, "nobody"),
    (["view", f"{NAME}@v7"], 1, "v7"),
    (["promote", f"{NAME}@v3"], 1, "held"),
    (["promote", f"{NAME}@v9"], 1, "v9"),
    (["promote", NAME], 2, f"{NAME}@REVISION"),
    (["promote", "nobody@v1"], 1, "nobody"),
    (["promote", "../jobs@v1"], 1, "../jobs"),
    (["reject", f"{NAME}@v1"], 1, "not held"),
    (["rollback", f"{NAME}@none"], 1, "none"),
    (["compare", f"{NAME}@v1", f"{NAME}@../x"], 1, "../x"),
    (["tag", NAME, "main"], 1, "main"),
    (["tag", NAME, "a/b"], 1, "a/b"),
    (["untag", NAME, "best"], 1, "best"),
    (["undelete", f"{NAME}@best"], 2, f"undelete {NAME}@v3"),
    (["pull", f"{NAME}@v7", "--to", "x"], 1, "v7"),
    (["card", f"{NAME}@.."], 1, ".."),
]


def test_errors_are_one_line(call, three_versions):
    for arguments, code, expected in REFUSED:
        message = call(*arguments, exit_code=code)
        assert expected in message, arguments
        assert len(message.splitlines()) == 1, arguments
