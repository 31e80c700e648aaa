"""The operator's commands about devices."""

import json

import pytest
from typer.testing import CliRunner

from mobizo.cli import app as cli
from shared.signing import new_private_key, public_text


@pytest.fixture
def call(fleet, operator, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", operator.token)

    def call(*arguments, stdin=None):
        return CliRunner().invoke(cli, ["device", *arguments], input=stdin, terminal_width=200)

    return call


def test_users_are_named_in_the_token_and_bound_and_unbound_later(fleet, call, operator):
    token = call("enroll-token", "--user", "alice", "--user", "bob").stdout.strip()
    body = {"name": "phone", "public_key": public_text(new_private_key().public_key()), "platform": "linux"}
    device = fleet.actor(token).post("/v1/devices", json=body).json()["device_id"]
    assert operator.get(f"/v1/devices/{device}").json()["users"] == ["alice", "bob"]
    assert call("bind", device, "carol").stdout == "phone: alice, bob, carol\n"
    assert call("unbind", device, "bob").exit_code == 0
    assert json.loads(call("bind", device, "alice", "--json").stdout)["users"] == ["alice", "carol"]
    assert call("label", device, "site=lab", "row=2").stdout == "phone: row=2 site=lab\n"
    assert json.loads(call("label", device, "row=", "--json").stdout)["labels"] == {"site": "lab"}
    assert json.loads(call("view", device, "--json").stdout) == operator.get(f"/v1/devices/{device}").json()
    assert "labels: site=lab" in call("view", device).stdout
    assert call("list").stdout.split("\t")[:4] == [device, "phone", "enrolled", "alice carol"]
    for arguments, message in (
        (("bind", "device_none", "alice"), "no device 'device_none'; `mobizo device list` shows what exists"),
        (("label", device, "site"), "KEY=VALUE"),
        (("label", device, "Not a label=1"), "labels"),
        (("bind", device, "Not A Name"), "user"),
        (("enroll-token", "--user", "a b"), "users.0"),
    ):
        result = call(*arguments)
        assert result.exit_code in (1, 2)
        assert message in result.stderr
        assert "Traceback" not in result.output


def test_a_device_is_revoked_by_its_name(fleet, call, operator):
    fleet.device(name="old")
    fleet.device(name="twin")
    twin = fleet.device(name="twin")
    assert call("revoke", "old", stdin="n\n").exit_code == 1
    result = call("revoke", "old", stdin="y\n")
    assert result.exit_code == 0
    assert result.stdout.endswith("old is revoked\n")
    assert "no device is named 'old'" in call("revoke", "old", "--yes").stderr
    assert twin.device_id in call("revoke", "twin", "--yes").stderr
    assert json.loads(call("revoke", twin.device_id, "--yes", "--json").stdout)["revoked_at"]
    assert "revoked" in call("list").stdout
