"""Tokens over REST: what a maker can make, never more than it is; that ends are ends; and when they were last used."""

import threading
from datetime import UTC, datetime, timedelta

import pytest

from server.identity.tenants import UserService
from server.identity.tokens import LastUsed, Token, TokenService, make_last_used
from shared.access import Role, Scope
from tests.server.homes import at_once


@pytest.fixture
def maker(home, fleet):
    """A client with a token of some scopes, its user's if one is named."""

    def maker(*scopes, role=Role.OPERATOR, user=None, lifetime=None):
        with home.database.writing() as session:
            owner = UserService(session).get("default", user) if user else None
            _, text = TokenService(session).issue(
                role, "default", "maker", scopes=scopes, user=owner, lifetime=lifetime
            )
        return fleet.actor(text)

    return maker


@pytest.fixture
def alice(home):
    with home.database.writing() as session:
        UserService(session).create("default", "alice", Role.OPERATOR)
    return "alice"


def make(actor, **body):
    answer = actor.post("/v1/tokens", json=body)
    assert answer.status_code == 201, answer.text
    assert answer.headers["cache-control"] == "no-store"
    return answer.json()


def days(view):
    begins, ends = (datetime.fromisoformat(view[name]) for name in ("created_at", "expires_at"))
    return (ends - begins) / timedelta(days=1)


@pytest.mark.both_databases
def test_a_token_is_made_listed_and_revoked(fleet, operator, problem):
    created = make(operator, name="shop")
    assert created["token"].startswith("mobizo-app-")
    assert created["view"]["scopes"] == [
        *("adapters:read", "adapters:score", "adapters:write"),
        *("cohorts:read", "cohorts:write", "jobs:read", "jobs:write", "webhooks:write"),
    ]
    assert days(created["view"]) == 90
    shop = fleet.actor(created["token"])
    assert shop.get("/v1/jobs").status_code == 200
    items = operator.get("/v1/tokens").json()["items"]
    assert [item["name"] for item in items] == ["shop", ""]
    assert created["token"] not in operator.get("/v1/tokens").text
    address = f"/v1/tokens/{created['view']['id']}"
    assert operator.delete(address).status_code == 204
    problem(shop.get("/v1/jobs"), 401, "unauthorized")
    problem(operator.delete(address), 404, "not-found")
    assert operator.get("/v1/tokens").json()["items"][0]["revoked_at"] is not None


def test_who_am_i(fleet, home, operator, device, maker, alice):
    user_identity = maker(Scope.JOBS_READ, user=alice).get("/v1/whoami").json()
    assert (user_identity["tenant"], user_identity["role"], user_identity["user"], user_identity["scopes"]) == (
        "default",
        "operator",
        "alice",
        ["jobs:read"],
    )
    assert operator.get("/v1/whoami").json()["scopes"] == sorted(str(scope) for scope in Scope)
    identity = device.get("/v1/whoami").json()
    assert (identity["role"], identity["device_id"], identity["scopes"]) == ("device", device.device_id, [])
    assert "server:read" not in fleet.operator("other").get("/v1/whoami").json()["scopes"]


def test_never_more_than_the_maker(maker, problem):
    small = maker(Scope.TOKENS_WRITE, Scope.JOBS_READ)
    refusal = problem(small.post("/v1/tokens", json={"scopes": ["jobs:read", "jobs:write"]}), 403, "forbidden")
    assert refusal["missing"] == ["jobs:write"]
    assert make(small)["view"]["scopes"] == ["jobs:read"]
    assert make(small, role="operator")["view"]["scopes"] == ["jobs:read", "tokens:write"]
    assert make(small, scopes=[])["view"]["scopes"] == []


def test_no_token_outlives_its_maker(maker, operator, problem):
    short = maker(Scope.TOKENS_WRITE, Scope.JOBS_READ, lifetime=timedelta(days=1))
    ends = short.get("/v1/whoami").json()["expires_at"]
    for lifetime in ("never", 2, 3650):
        problem(short.post("/v1/tokens", json={"expires_in_days": lifetime}), 403, "forbidden")
    view = make(short, scopes=["jobs:read"])["view"]
    assert datetime.fromisoformat(view["expires_at"]) <= datetime.fromisoformat(ends) + timedelta(seconds=1)
    assert make(operator, scopes=["jobs:read"], expires_in_days="never")["view"]["expires_at"] is None


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"role": "app", "scopes": ["tokens:write"]}, 400, "bad-request"),
        ({"role": "operator", "user": "bob"}, 400, "bad-request"),  # bob is an app's user
        ({"role": "device"}, 422, "invalid-request"),
        *(({"expires_in_days": days}, 422, "invalid-request") for days in (0, 3651, "soon", True)),
    ],
)
def test_tokens_that_cannot_be(home, operator, problem, body, status, code):
    with home.database.writing() as session:
        UserService(session).create("default", "bob", Role.APP)
    problem(operator.post("/v1/tokens", json=body), status, code)


def test_a_user_s_tokens_are_the_user_s_and_end_with_the_user(fleet, home, maker, operator, alice, problem):
    user_actor = maker(Scope.TOKENS_WRITE, Scope.JOBS_READ, user=alice)
    child = make(user_actor)
    assert child["view"]["user"] == "alice"
    user_token = make(operator, user="alice")
    assert user_token["view"]["user"] == "alice"
    actors = [user_actor, fleet.actor(child["token"]), fleet.actor(user_token["token"])]
    assert [actor.get("/v1/jobs").status_code for actor in actors] == [200] * 3
    with home.database.writing() as session:
        UserService(session).disable("default", alice)
    for actor in actors:
        assert "disabled" in problem(actor.get("/v1/jobs"), 401, "unauthorized")["detail"]
    problem(operator.post("/v1/tokens", json={"user": "alice"}), 409, "conflict")
    problem(operator.post("/v1/tokens", json={"user": "nobody"}), 404, "not-found")


def test_devices_tokens_are_not_among_them(home, operator, device, problem):
    with home.database.reading() as session:
        token_id = session.query(Token.id).filter(Token.device_id == device.device_id).scalar()
    assert token_id not in operator.get("/v1/tokens").text
    problem(operator.delete(f"/v1/tokens/{token_id}"), 404, "not-found")
    assert device.get("/v1/whoami").status_code == 200


def last_used(home):
    with home.database.reading() as session:
        return {token.number: token.last_used_at for token in session.query(Token)}


def test_a_request_is_noted_and_written_later(home, fleet, standing, app, operator):
    began = datetime.now(UTC)
    for _ in range(3):
        assert app.get("/v1/jobs").status_code == 200
    assert set(last_used(home).values()) == {None}
    standing[0].state.mobizo.get(make_last_used).write(home.database)
    moments = [moment for moment in last_used(home).values() if moment]
    assert len(moments) == 1
    assert began < moments[0] < datetime.now(UTC)
    usage_times = {item["id"]: item["last_used_at"] for item in operator.get("/v1/tokens").json()["items"]}
    assert datetime.fromisoformat(usage_times[app.get("/v1/whoami").json()["token_id"]]) == moments[0]


def test_a_use_that_is_recorded_while_others_are_written_is_not_lost(home, app):
    """A thread begins to record a use, then another one writes all uses, and then the first one ends."""
    began, written = threading.Event(), threading.Event()

    class Number(int):
        def __hash__(self):  # is called in the middle of recording
            began.set()
            written.wait(0.5)  # `write` may have to wait for this
            return int(self)

    uses, moment = LastUsed(), datetime.now(UTC)
    (number,) = last_used(home)

    def write():
        began.wait()
        uses.write(home.database)
        written.set()

    at_once(lambda: uses.note(Number(number), moment), write)
    uses.write(home.database)
    assert last_used(home) == {number: moment}
