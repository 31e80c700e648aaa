"""The operator's commands about tenants, users and tokens: what they print, and what they end."""

import json

import pytest

from server.identity.quotas import DEFAULTS
from shared.errors import BadRequest, Conflict, NotFound


def new_token(command, *options):
    return json.loads(command("token", "create", *options, "--json"))


def test_tenants(command, fleet, problem):
    command("tenant", "create", "acme")
    created = new_token(command, "--role", "app", "--tenant", "acme", "--name", "shop")
    assert (created["tenant"], created["token"].startswith("mobizo-app-")) == ("acme", True)
    rows = json.loads(command("tenant", "list", "--json"))
    assert [(row["name"], row["suspended_at"]) for row in rows] == [("default", None), ("acme", None)]
    app = fleet.actor(new_token(command, "--role", "app", "--tenant", "acme")["token"])
    assert app.get("/v1/jobs").status_code == 200
    command("tenant", "suspend", "acme")
    problem(app.get("/v1/jobs"), 403, "tenant-suspended")
    assert json.loads(command("tenant", "list", "--json"))[1]["suspended_at"]
    command("tenant", "suspend", "acme")
    command("tenant", "resume", "acme")
    assert app.get("/v1/jobs").status_code == 200
    assert "acme" in command("tenant", "list")


def test_quotas(command):
    command("tenant", "quota", "default", "waiting_jobs", "7")
    rows = {row["quota"]: row for row in json.loads(command("tenant", "view", "default", "--json"))}
    assert rows["waiting_jobs"] == {"quota": "waiting_jobs", "used": 0, "limit": 7, "default": 10_000}
    assert rows["tokens"]["limit"] == rows["tokens"]["default"]
    assert {name: row["default"] for name, row in rows.items()} == DEFAULTS
    command("tenant", "quota", "default", "waiting_jobs", "default")
    assert "10000" in command("tenant", "view", "default")


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (Conflict, "default", "tenant create default"),
        (BadRequest, "Not-Good", "tenant create Not-Good"),
        (NotFound, "tenant create", "tenant suspend nobody"),
        (NotFound, "tenant create", "tenant view nobody"),
        (NotFound, "tenant create", "tenant quota nobody tokens 5"),
        (BadRequest, "default", "tenant quota default tokens 5x"),
        (NotFound, "tenant create", "tenant resume nobody"),
        (NotFound, "tenant create", "user create eve --role app --tenant nobody"),
        (NotFound, "tenant create", "user list --tenant nobody"),
        (NotFound, "tenant create", "token create --role app --tenant nobody"),
        (NotFound, "tenant create", "device enroll-token --tenant nobody"),
        (Conflict, "bob", "user create bob --role app"),
        (BadRequest, "enroll", "user create phone --role device"),
        (BadRequest, "Not-Good", "user create Not-Good --role app"),
        (NotFound, "user list", "user disable nobody"),
        (BadRequest, "role", "token create"),
        (BadRequest, "bob", "token create --user bob --role operator"),
        (BadRequest, "enroll", "token create --role device"),
        (BadRequest, "tokens:write", "token create --role app --scope tokens:write"),
        (BadRequest, "never", "token create --role app --expires-in-days 0"),
        (BadRequest, "never", "token create --role app --expires-in-days soon"),
    ],
)
def test_what_cannot_be(command, error, message, arguments):
    command("user", "create", "bob", "--role", "app")
    with pytest.raises(error, match=message):
        command(*arguments.split())


def test_users(command, fleet, problem):
    command("user", "create", "bob", "--role", "operator")
    token = new_token(command, "--user", "bob", "--scope", "jobs:read", "--scope", "devices:read")
    assert (token["role"], token["scopes"]) == ("operator", ["devices:read", "jobs:read"])
    bob = fleet.actor(token["token"])
    assert bob.get("/v1/whoami").json()["user"] == "bob"
    users = json.loads(command("user", "list", "--json"))
    assert [(row["name"], row["role"], row["disabled_at"]) for row in users] == [("bob", "operator", None)]
    command("user", "disable", "bob")
    problem(bob.get("/v1/whoami"), 401, "unauthorized")
    assert json.loads(command("user", "list", "--json"))[0]["disabled_at"]
    assert "bob" in command("user", "list")
    with pytest.raises(Conflict, match="disabled"):
        command("token", "create", "--user", "bob")


def test_what_tells_of_every_tenant_is_given_by_name_only(command):
    command("tenant", "create", "acme")
    operator = ("--role", "operator", "--tenant", "acme")
    assert "metrics:read" not in new_token(command, *operator)["scopes"]
    assert new_token(command, *operator, "--scope", "metrics:read")["scopes"] == ["metrics:read"]
    assert "metrics:read" in new_token(command, "--role", "operator")["scopes"]


def test_a_one_time_token_enrolls_one_device_for_its_users(command, fleet):
    token = command("device", "enroll-token", "--user", "bob", "--user", "carol").strip()
    body = {"name": "tablet", "public_key": "A" * 43 + "=", "platform": "linux"}
    assert fleet.actor(token).post("/v1/devices", json=body).status_code == 201
    assert fleet.actor(token).post("/v1/devices", json=body).status_code == 401
    (device,) = fleet.operator().get("/v1/devices").json()["items"]
    assert device["users"] == ["bob", "carol"]
    with pytest.raises(BadRequest, match="user"):
        command("device", "enroll-token", "--user", "a b")
