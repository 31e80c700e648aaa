"""The operator's commands about tenants, users and tokens: what they print, and what they end."""

import json
from datetime import datetime, timedelta

import pytest

from shared.errors import BadRequest, Conflict, NotFound


def made(command, *options):
    return json.loads(command("tokens", "create", *options, "--json"))


def test_tenants(command, fleet, problem):
    command("tenants", "create", "acme")
    rows = json.loads(command("tenants", "list", "--json"))
    assert [(row["name"], row["suspended_at"]) for row in rows] == [("default", None), ("acme", None)]
    app = fleet.actor(made(command, "--role", "app", "--tenant", "acme")["token"])
    assert app.get("/v1/jobs").status_code == 200
    command("tenants", "suspend", "acme")
    problem(app.get("/v1/jobs"), 403, "tenant-suspended")
    assert json.loads(command("tenants", "list", "--json"))[1]["suspended_at"]
    command("tenants", "suspend", "acme")
    command("tenants", "resume", "acme")
    assert app.get("/v1/jobs").status_code == 200
    assert "acme" in command("tenants", "list")


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (Conflict, "default", "tenants create default"),
        (BadRequest, "Not-Good", "tenants create Not-Good"),
        (NotFound, "tenants create", "tenants suspend nobody"),
        (NotFound, "tenants create", "tenants resume nobody"),
        (NotFound, "tenants create", "users create eve --role app --tenant nobody"),
        (NotFound, "tenants create", "users list --tenant nobody"),
        (NotFound, "tenants create", "tokens create --role app --tenant nobody"),
        (NotFound, "tenants create", "enroll-token --tenant nobody"),
        (Conflict, "bob", "users create bob --role app"),
        (BadRequest, "enroll", "users create phone --role device"),
        (BadRequest, "Not-Good", "users create Not-Good --role app"),
        (NotFound, "users list", "users disable nobody"),
        (BadRequest, "role", "tokens create"),
        (BadRequest, "bob", "tokens create --user bob --role operator"),
        (BadRequest, "enroll", "tokens create --role device"),
        (BadRequest, "tokens:write", "tokens create --role app --scope tokens:write"),
        (BadRequest, "never", "tokens create --role app --expires-in-days 0"),
        (BadRequest, "never", "tokens create --role app --expires-in-days soon"),
    ],
)
def test_what_cannot_be(command, error, says, arguments):
    command("users", "create", "bob", "--role", "app")
    with pytest.raises(error, match=says):
        command(*arguments.split())


def test_users(command, fleet, problem):
    command("users", "create", "bob", "--role", "operator")
    token = made(command, "--user", "bob", "--scope", "jobs:read", "--scope", "devices:read")
    assert (token["role"], token["scopes"]) == ("operator", ["devices:read", "jobs:read"])
    bob = fleet.actor(token["token"])
    assert bob.get("/v1/whoami").json()["user"] == "bob"
    listed = json.loads(command("users", "list", "--json"))
    assert [(row["name"], row["role"], row["disabled_at"]) for row in listed] == [("bob", "operator", None)]
    assert json.loads(command("tokens", "list", "--json"))[0]["user"] == "bob"
    command("users", "disable", "bob")
    problem(bob.get("/v1/whoami"), 401, "unauthorized")
    assert json.loads(command("users", "list", "--json"))[0]["disabled_at"]
    assert "bob" in command("users", "list")
    with pytest.raises(Conflict, match="disabled"):
        command("tokens", "create", "--user", "bob")


def test_how_long_tokens_last(command, home, monkeypatch):
    def days(token):
        return round((datetime.fromisoformat(token["expires_at"]) - datetime.now().astimezone()) / timedelta(days=1))

    assert days(made(command, "--role", "app")) == 90
    assert days(made(command, "--role", "app", "--expires-in-days", "7")) == 7
    assert made(command, "--role", "app", "--expires-in-days", "never")["expires_at"] is None
    monkeypatch.setenv("MOBIZO_TOKEN_DAYS", "3")
    assert days(made(command, "--role", "app")) == 3


def test_what_tells_of_every_tenant_is_given_by_name_only(command):
    command("tenants", "create", "acme")
    operator = ("--role", "operator", "--tenant", "acme")
    assert "metrics:read" not in made(command, *operator)["scopes"]
    assert made(command, *operator, "--scope", "metrics:read")["scopes"] == ["metrics:read"]
    assert "metrics:read" in made(command, "--role", "operator")["scopes"]
