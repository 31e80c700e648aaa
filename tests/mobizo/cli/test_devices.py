"""A device that asks to enroll, by the agent's own code, and the operator's commands that approve or deny it."""

import json
import threading

import pytest
from typer.testing import CliRunner

from device_agent.protocol.client import DeviceClient
from device_agent.protocol.enrollment import request_enrollment
from mobizo.cli import app as cli
from shared.errors import Forbidden, MobizoError
from shared.signing import fingerprint, new_private_key, public_text
from shared.transport import Transport


class JoiningDevice(threading.Thread):
    """A device that waits for an operator and polls every second."""

    def __init__(self, url):
        super().__init__(daemon=True)
        self.url, self.key = url, new_private_key()
        self.public = public_text(self.key.public_key())
        self.result, self.authorization, self.code_shown = None, None, threading.Event()

    def show(self, authorization):
        self.authorization = authorization
        self.code_shown.set()

    def run(self):
        with Transport(self.url) as transport:
            try:
                self.result = request_enrollment(transport, "phone", self.public, self.show)
            except MobizoError as error:
                self.result = error

    def code(self):
        assert self.code_shown.wait(30), self.result
        return self.authorization.user_code


@pytest.fixture
def joining(fleet, monkeypatch):
    monkeypatch.setattr("server.identity.devices.authorization.POLL_INTERVAL_SECONDS", 1)
    device = JoiningDevice(fleet.url)
    device.start()
    return device


@pytest.fixture
def call(fleet, operator, monkeypatch):
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", operator.token)

    def call(*arguments, stdin=None):
        return CliRunner().invoke(cli, ["device", *arguments], input=stdin, terminal_width=200)

    return call


def test_an_operator_compares_and_approves(joining, call, operator):
    result = call("approve", joining.code().lower(), stdin="y\n")
    assert result.exit_code == 0, result.output
    for text in ("phone", fingerprint(joining.public), "127.0.0.1"):
        assert text in result.stderr
    joining.join(30)
    (device,) = operator.get("/v1/devices").json()["items"]
    assert device["id"] == joining.result.device_id
    with DeviceClient(joining.url, joining.result.token, joining.key) as client:
        assert client.lease(["movies"]) is None


def test_an_unconfirmed_device_keeps_waiting_until_it_is_denied(joining, call):
    result = call("approve", joining.code(), stdin="n\n")
    assert result.exit_code == 1
    assert "was not approved" in result.stderr
    result = call("reject", joining.code(), "--json")
    assert json.loads(result.stdout)["state"] == "denied"
    joining.join(30)
    assert isinstance(joining.result, Forbidden)
    second_result = call("approve", joining.code(), "--yes")
    assert second_result.exit_code == 1
    assert "refused before" in second_result.stderr


def test_unknown_codes_are_rejected(call):
    for code in ("AAAA-AAAA", "no code", "../../x"):
        result = call("approve", code, "--yes")
        assert result.exit_code == 1
        assert "no device that waits" in result.stderr or "nothing at this address" in result.stderr


def test_users_are_named_at_approval_and_bound_and_unbound_later(joining, call, operator):
    assert call("approve", joining.code(), "--yes", "--user", "alice", "--user", "bob").exit_code == 0
    joining.join(30)
    device = joining.result.device_id
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
        (("approve", "AAAA-AAAA", "--yes", "--user", "a b"), "users.0"),
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
