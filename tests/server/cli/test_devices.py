"""The operator's commands about devices: what they print, and one line for each error."""

import json

import pytest

from shared.errors import BadRequest, Conflict, NotFound


def test_listing_and_revoking_devices(command, fleet):
    phone, tablet = fleet.device(name="phone"), fleet.device(name="tablet")
    fleet.device("other", name="theirs")
    devices = json.loads(command("device", "list", "--json"))
    assert [(row["id"], row["name"]) for row in devices] == [(phone.device_id, "phone"), (tablet.device_id, "tablet")]
    assert "phone" in command("device", "revoke", "phone")
    command("device", "revoke", tablet.device_id)
    assert all(row["revoked_at"] for row in json.loads(command("device", "list", "--json")))
    assert tablet.device_id in command("device", "list")
    for device in (phone, tablet):
        assert device.post("/v1/leases", json={"datasets": []}).status_code == 401


def test_devices_that_cannot_be_revoked(command, fleet):
    first, second = fleet.device(name="twin"), fleet.device(name="twin")
    foreign_device = fleet.device("other", name="theirs")
    with pytest.raises(NotFound, match="device list"):
        command("device", "revoke", "nobody")
    with pytest.raises(NotFound):
        command("device", "revoke", foreign_device.device_id)
    with pytest.raises(Conflict, match=first.device_id):
        command("device", "revoke", "twin")
    command("device", "revoke", first.device_id)
    command("device", "revoke", first.device_id)
    assert second.device_id in command("device", "revoke", "twin")
    assert foreign_device.post("/v1/leases", json={"datasets": []}).status_code == 204


def test_labelling_a_device(command, device):
    output = command("device", "label", device.device_id, "site=lab", "row=2")
    assert output.strip().endswith("row=2, site=lab")
    labels = json.loads(command("device", "label", "phone", "row=", "shelf=a", "--json"))
    assert labels == {"labels": {"shelf": "a", "site": "lab"}}
    (row,) = json.loads(command("device", "list", "--json"))
    assert row["labels"] == labels["labels"]
    for label in ("site", "site=in the lab", "=lab"):
        with pytest.raises(BadRequest):
            command("device", "label", "phone", label)
    with pytest.raises(NotFound):
        command("device", "label", "nobody", "site=lab")


def test_binding_and_unbinding_users(command, fleet, app, device):
    token = command("device", "enroll-token", "--user", "bob", "--user", "carol").strip()
    body = {"name": "tablet", "public_key": "A" * 43 + "=", "platform": "linux"}
    assert fleet.actor(token).post("/v1/devices", json=body).status_code == 201
    assert command("device", "bind", "tablet", "alice", "dave").strip().endswith("alice, bob, carol, dave")
    fleet.ready_job(app)
    lease = device.lease()
    assert command("device", "unbind", "phone", "alice").strip().endswith("no users")
    beat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"})
    assert beat.status_code == 410
    assert json.loads(command("device", "unbind", "tablet", "bob", "carol", "--json")) == {"users": ["alice", "dave"]}
    rows = json.loads(command("device", "list", "--json"))
    assert {row["name"]: row["users"] for row in rows} == {"phone": [], "tablet": ["alice", "dave"]}
    for arguments in (("device", "bind", "phone", "Not A Name"), ("device", "enroll-token", "--user", "a b")):
        with pytest.raises(BadRequest, match="user"):
            command(*arguments)
    with pytest.raises(NotFound):
        command("device", "bind", "nobody", "alice")
