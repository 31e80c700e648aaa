"""The operator's commands about devices."""

import json
from functools import partial

import pytest

from shared.signing import new_private_key, public_text


@pytest.fixture
def call(operator_command):
    return partial(operator_command, "device")


def test_users_are_named_in_the_token_and_bound_and_unbound_later(fleet, call, operator):
    token = call("enroll-token", "--user", "alice", "--user", "bob").strip()
    body = {"name": "phone", "public_key": public_text(new_private_key().public_key()), "platform": "linux"}
    device = fleet.actor(token).post("/v1/devices", json=body).json()["device_id"]
    assert operator.get(f"/v1/devices/{device}").json()["users"] == ["alice", "bob"]
    assert call("bind", device, "carol") == "phone: alice, bob, carol\n"
    call("unbind", device, "bob")
    assert json.loads(call("bind", device, "alice", "--json"))["users"] == ["alice", "carol"]
    assert call("label", device, "site=lab", "row=2") == "phone: row=2 site=lab\n"
    assert json.loads(call("label", device, "row=", "--json"))["labels"] == {"site": "lab"}
    assert json.loads(call("view", device, "--json")) == operator.get(f"/v1/devices/{device}").json()
    assert "labels: site=lab" in call("view", device)
    assert call("list").split("\t")[:4] == [device, "phone", "enrolled", "alice carol"]
    for arguments, message, exit_code in (
        (("bind", "device_none", "alice"), "no device 'device_none'; `mobizo device list` shows what exists", 1),
        (("label", device, "site"), "KEY=VALUE", 2),
        (("label", device, "Not a label=1"), "labels", 2),
        (("bind", device, "Not A Name"), "user", 1),
        (("enroll-token", "--user", "a b"), "users.0", 2),
    ):
        assert message in call(*arguments, exit_code=exit_code)


def test_a_device_is_revoked_by_its_name(fleet, call, operator):
    fleet.device(name="old")
    fleet.device(name="twin")
    twin = fleet.device(name="twin")
    call("revoke", "old", stdin="n\n", exit_code=1)
    assert call("revoke", "old", stdin="y\n").endswith("old is revoked\n")
    assert "no device is named 'old'" in call("revoke", "old", "--yes", exit_code=1)
    assert twin.device_id in call("revoke", "twin", "--yes", exit_code=1)
    assert json.loads(call("revoke", twin.device_id, "--yes", "--json"))["revoked_at"]
    assert "revoked" in call("list")
