"""Every route and every kind of caller, over HTTP: who is let in, who is refused and how, and that no tenant sees
another's things.

The routes are the application's own; ROWS in `rows` says what each may be asked by whom. Each route needs a row there.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest

from server.dashboard.access import SignedIn
from server.identity.access_rules import Holder, OneTime, Open
from server.identity.devices.service import revoke_device
from server.identity.tenants import TenantService, UserService
from server.identity.tokens import TokenService
from shared.access import Role, Scope
from tests.server.federation.conftest import cohort_request
from tests.server.identity.rows import ANYONE, DEVICE, EITHER, ONE_TIME, PERSON, PERSON_OR_DEVICE, ROWS, SESSION
from tests.server.identity.rules import found_routes
from tests.server.registry.trajectories.runs import Run, finish

WITHOUT_SESSION = ("nobody", "operator", "device")  # who are asked; tests/server/dashboard has people with sessions
# The pages that describe the API: plain routes of FastAPI's, open to all, about no tenant.
PAGES = {"/openapi.json"}
HERE = "add it to ROWS in tests/server/identity/rows.py, with who may ask it"

# What a path may name: nothing of the sort here, and (in `theirs`) a thing of tenant `default`.
ABSENT = {
    "job_id": "job_none",
    "lease_id": "lease_none",
    "device_id": "device_none",
    "token_id": "token_none",
    "webhook_id": "webhook_none",
    "recipe_id": "0" * 64,
    "sha256": "0" * 64,
    "name": "nothing",
    "model": "nothing",
    "cohort_name": "nothing",
    "version": "1",
    "number": "1",
    "step": "1",
    "revision": "main",
    "file": "README.md",
    "tenant": "default",
    "path": "README.md",
    "platform": "linux-x86_64",
    "user": "alice",
    "anything": "nothing",
}


def rule(who):
    """The rule that a route must have for `who` to be what ROWS says."""
    if who == ANYONE:
        return Open
    if who == ONE_TIME:
        return OneTime()
    if who.startswith(SESSION):
        return SignedIn(frozenset(map(Scope, who.removeprefix(SESSION).split())))
    scopes = frozenset() if who in (DEVICE, PERSON, PERSON_OR_DEVICE) else frozenset({Scope(who.removeprefix(EITHER))})
    return Holder(scopes, people=who != DEVICE, devices=who == DEVICE or who.startswith(EITHER))


def complaints(app):
    """What is wrong with the rules of an application's routes."""
    for route in found_routes(app):
        if route.path in PAGES:
            continue
        if len(route.rules) != 1:
            yield f"{route.name} has {len(route.rules)} rules; server/identity/access_rules.py says how it gets its one"
            continue
        if route.late:
            yield f"{route.name} begins a transaction before its rule: make the rule its first parameter"
        row = ROWS.get(route.name.replace("HEAD ", "GET "))
        if row is None:
            yield f"{route.name} has no row: {HERE}"
        elif rule(row.who) not in (route.rules[0], type(route.rules[0])):
            yield f"{route.name} has the rule {route.rules[0]}, and its row says: {row.who}"


@pytest.fixture
def routes(standing):
    """Every route but the pages."""
    return [route for route in found_routes(standing[0]) if route.path not in PAGES]


def test_every_route_has_one_rule_and_a_row(standing, routes):
    assert list(complaints(standing[0])) == []
    names = {route.name for route in routes}
    assert set(ROWS) <= names, "rows of routes that are no more"
    described = {f"{method.upper()} {path}" for path, item in standing[0].openapi()["paths"].items() for method in item}
    assert described <= names, "the walk over the routes missed some"


@dataclass
class Caller:
    """One kind of caller: what answers it when it may not at all, and else what it is and may."""

    actor: object
    refused: tuple[int, str] | None = None
    device: bool = False
    scopes: frozenset[str] = field(default_factory=frozenset)

    def expected(self, who):
        """(status, code) of a refusal, or None: let in."""
        if who == ANYONE or (who == ONE_TIME and self.refused == (401, "one-time")):
            return None
        if who == ONE_TIME:
            return 401, "unauthorized"
        if self.refused is not None:
            return self.refused[0], self.refused[1].replace("one-time", "unauthorized")
        if self.device:
            is_allowed = who == DEVICE or who.startswith(EITHER)
        else:
            is_allowed = who in (PERSON, PERSON_OR_DEVICE) or who.removeprefix(EITHER) in self.scopes
        return None if is_allowed else (403, "forbidden")


ALL = frozenset(str(scope) for scope in Scope)
OF_SERVER = frozenset({"server:read", "metrics:read"})
OF_APP = frozenset(
    {
        "jobs:read",
        "jobs:write",
        "adapters:read",
        "adapters:write",
        "adapters:score",
        "cohorts:read",
        "cohorts:write",
        "webhooks:write",
    }
)


@pytest.fixture
def callers(fleet, home):
    """Every kind of caller, by a name."""
    unauthorized = (401, "unauthorized")
    suspended = (403, "tenant-suspended")

    def issue_token(role, tenant="default", **options):
        with home.database.writing() as session:
            token, text = TokenService(session).issue(role, tenant, "", **options)
        return token, text

    _, expired_token = issue_token(Role.OPERATOR, lifetime=timedelta(seconds=-1))
    revoked_token, revoked_secret = issue_token(Role.OPERATOR)
    _, unknown_token = issue_token(Role.OPERATOR)
    revoked_device = fleet.device(name="lost")
    shut = [fleet.operator("shut"), fleet.app("shut"), fleet.device("shut")]
    with home.database.writing() as session:
        TokenService(session).revoke(revoked_token.id)
        bob = UserService(session).create("default", "bob", Role.OPERATOR)
        _, bobs = TokenService(session).issue(Role.OPERATOR, "default", "", user=bob)
        UserService(session).disable("default", "bob")
        revoke_device(session, "default", revoked_device.device_id)
        TenantService(session).suspend("shut")
    by_name = {
        "nobody": Caller(fleet.actor(), unauthorized),
        "nonsense": Caller(fleet.actor("nonsense"), unauthorized),
        "a token never issued": Caller(fleet.actor(unknown_token[:-4] + "AAAA"), unauthorized),
        "an expired token": Caller(fleet.actor(expired_token), unauthorized),
        "a revoked token": Caller(fleet.actor(revoked_secret), unauthorized),
        "a disabled user": Caller(fleet.actor(bobs), unauthorized),
        "a revoked device": Caller(revoked_device, unauthorized),
        "a suspended operator": Caller(shut[0], suspended),
        "a suspended app": Caller(shut[1], suspended),
        "a suspended device": Caller(shut[2], suspended),
        "a one-time token": Caller(
            fleet.actor(fleet.operator().post("/v1/enrollments", json={}).json()["token"]), (401, "one-time")
        ),
        "operator": Caller(fleet.operator(), scopes=ALL),
        "app": Caller(fleet.app(), scopes=OF_APP),
        "device": Caller(fleet.device(), device=True),
        "foreign operator": Caller(fleet.operator("other"), scopes=ALL - OF_SERVER),
        "foreign app": Caller(fleet.app("other"), scopes=OF_APP),
        "foreign device": Caller(fleet.device("other"), device=True),
    }
    # A route that takes one scope and no other, by itself, asks for that scope and for nothing else.
    for scope in ALL:
        _, text = issue_token(Role.OPERATOR, scopes=[Scope(scope)])
        by_name[f"only {scope}"] = Caller(fleet.actor(text), scopes=frozenset({scope}))
    return by_name


def ask(actor, route, row, names):
    """One request; HEAD's as GET's, its answer without a body."""
    options = {"content": row.body} if isinstance(row.body, bytes) else {"json": row.body}
    if row.body is None:
        options = {}
    path = route.path.format_map(names)
    return actor.request(route.method, f"{path}?{row.query}" if row.query else path, **options)


def code_of(answer):
    """The code of a refusal; OpenAI's routes have OpenAI's form and word for a wrong token."""
    document = answer.json()
    code = document["error"]["code"] if "error" in document else document.get("code")
    return "unauthorized" if code == "invalid_api_key" else code


def test_every_route_with_every_kind_of_caller(routes, callers):
    wrong = []
    for route in routes:
        row = ROWS[route.name.replace("HEAD ", "GET ")]
        for name, caller in callers.items():
            if row.who.startswith(SESSION) and name not in WITHOUT_SESSION:
                continue
            expected = caller.expected(row.who)
            answer = ask(caller.actor, route, row, ABSENT)
            if row.who.startswith(SESSION):
                good = answer.status_code == 303 and answer.headers["location"].startswith("/ui/login")
            elif expected is None:
                good = answer.status_code not in (401, 403) and answer.status_code < 500
            elif route.method == "HEAD":
                good = answer.status_code == expected[0]
            else:
                good = (answer.status_code, code_of(answer)) == expected
            if not good:
                wrong.append(f"{route.name}, {name}: {answer.status_code} {answer.text[:200]}; expected {expected}")
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def theirs(fleet, home, app, device, lease, tmp_path):
    """What tenant `default` owns, by what paths call it."""
    finish(device, lease, Run(lease, tmp_path, steps=3, best=2, job_seed=0))
    fleet.ready_job(app, start={"adapter": lease["job"]["request"]["adapter"]})
    assert app.post("/v1/cohorts", json=cohort_request(quorum=1)).status_code == 201
    assert app.put("/v1/cohorts/readers/members/alice", json={"device": device.device_id}).status_code == 200
    assert app.post("/v1/cohorts/readers/rounds").status_code == 201
    webhook = app.post("/v1/webhooks", json={"url": "https://shop.example", "events": ["job.failed"]})
    return ABSENT | {
        "cohort_name": "readers",
        "job_id": lease["job"]["id"],  # which has ended, and so have its events
        "lease_id": device.lease()["id"],
        "recipe_id": lease["job"]["recipe_id"],
        "sha256": lease["manifest"]["manifest"]["files"][0]["sha256"],
        "name": "alice-movies",
        "model": "alice-movies",
        "device_id": device.device_id,
        "token_id": app.get("/v1/whoami").json()["token_id"],
        "webhook_id": webhook.json()["view"]["id"],
    }


def revealed(answer, names):
    """What an answer tells, without the names that the question held."""
    if not answer.content:
        return {"status": answer.status_code}
    document = answer.json()
    if "error" in document:
        document = {"instance": "", "detail": document["error"].pop("message")} | document
    text = document.pop("instance") + document["detail"]
    for name in names.values():
        text = text.replace(name, "?")
    return document | {"detail": text}


def test_another_tenant_s_things_are_as_if_they_were_not_there(fleet, routes, theirs, app, device):
    strangers = (
        Caller(fleet.app("other"), scopes=OF_APP),
        Caller(fleet.operator("other"), scopes=ALL - OF_SERVER),
        Caller(fleet.device("other"), device=True),
    )
    for route in routes:
        row = ROWS[route.name.replace("HEAD ", "GET ")]
        if row.who.startswith((ANYONE, ONE_TIME, SESSION)) or ("{" not in route.path and route.method != "GET"):
            continue
        for stranger in (caller.actor for caller in strangers if caller.expected(row.who) is None):
            answer = ask(stranger, route, row, theirs)
            if "{" in route.path and not row.shared:
                assert answer.status_code == 404, (route.name, answer.text)
                assert revealed(answer, theirs) == revealed(ask(stranger, route, row, ABSENT), ABSENT), route.name
            else:
                for id_name in ("job_id", "lease_id", "device_id", "token_id", "webhook_id"):
                    assert theirs[id_name] not in answer.text, route.name
        if route.method in ("GET", "HEAD") and "{" in route.path and not row.shared:
            owner = device if row.who == DEVICE else app
            if row.who.removeprefix(EITHER) in OF_APP or row.who == DEVICE:
                assert ask(owner, route, row, theirs).status_code == row.owner, route.name
