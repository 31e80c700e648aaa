"""Every route and every kind of caller, over HTTP: who is let in, who is refused and how, and that no tenant sees
another's things.

The routes are the application's own; ROWS says what each may be asked by whom. A route without a row fails here.
"""

from dataclasses import dataclass, field
from datetime import timedelta

import pytest
from fastapi import APIRouter, FastAPI
from sqlalchemy import select

from server.dashboard.access import SignedIn
from server.database.columns import utc_now
from server.identity.access_rules import Device as DeviceCaller
from server.identity.access_rules import Holder, OneTime, Open
from server.identity.devices.service import DeviceService
from server.identity.tenants import TenantService, UserService
from server.identity.tokens import TokenService
from server.registry.exports.models import Conversion, ConversionFile, ConversionState
from server.web.state import Reading
from shared.access import Role, Scope
from shared.signing import new_private_key, public_text
from tests.server.conftest import job_request, result
from tests.server.federation.conftest import cohort_request
from tests.server.identity.rules import found_routes
from tests.server.registry.trajectories.runs import Run, finish

ANYONE, ONE_TIME, DEVICE = "anyone", "the bearer of a one-time token", "a device"
EITHER = "either "  # and a scope: or a device
PERSON = "a person or a service, with any scopes"
PERSON_OR_DEVICE = EITHER + PERSON
SESSION = "a session"  # and scopes: of a person at the dashboard, which knows no bearer tokens
WITHOUT_SESSION = ("nobody", "operator", "device")  # who are asked; tests/server/dashboard has people with sessions
FORM = b"x="
BASE64, SIGNED = "A" * 43 + "=", "A" * 86 + "=="  # 32 and 64 bytes
KEYS = {"member": "x", "identity": BASE64, "sealing": BASE64, "masking": BASE64, "signature": SIGNED}
KEY = public_text(new_private_key().public_key())


@dataclass
class Row:
    """Who may ask a route (one of the words above, or a scope), with which body."""

    who: str
    body: object = None
    shared: bool = False  # what its path names is the same for every tenant
    query: str = ""
    owner: int = 200  # what answers whoever owns the things that its path names


# One row for each route: "METHOD /path" -> who may ask it. HEAD is as GET.
ROWS = {
    "GET /v1/server": Row(ANYONE),
    "GET /v1/server/keys": Row(ANYONE),
    "GET /v1/server/usage": Row("server:read"),
    "GET /healthz": Row(ANYONE),
    "GET /readyz": Row(ANYONE),
    "GET /metrics": Row("metrics:read"),
    "GET /v1/whoami": Row(PERSON_OR_DEVICE),
    "GET /v1/tokens": Row("tokens:write"),
    "POST /v1/tokens": Row("tokens:write", {"scopes": []}),
    "DELETE /v1/tokens/{token_id}": Row("tokens:write"),
    "POST /v1/tokens/{token_id}/rotate": Row("tokens:write"),
    "POST /v1/enrollments": Row("devices:write", {}),
    "POST /v1/devices": Row(ONE_TIME, {"name": "phone", "public_key": KEY, "platform": "linux"}),
    "GET /v1/devices": Row("devices:read"),
    "GET /v1/devices/{device_id}": Row("devices:read"),
    "PATCH /v1/devices/{device_id}": Row("devices:write", {"labels": {}}),
    "POST /v1/devices/{device_id}/revoke": Row("devices:write"),
    "PUT /v1/devices/{device_id}/users/{user}": Row("devices:write"),
    "DELETE /v1/devices/{device_id}/users/{user}": Row("devices:write"),
    "GET /v1/devices/{device_id}/privacy": Row("jobs:read"),
    "POST /v1/oauth/device_authorization": Row(ANYONE),
    "POST /v1/oauth/token": Row(ANYONE),
    "GET /device": Row(ANYONE),
    "GET /v1/device-requests/{user_code}": Row("devices:read", shared=True),
    "POST /v1/device-requests/{user_code}/approve": Row("devices:write", shared=True),
    "POST /v1/device-requests/{user_code}/deny": Row("devices:write", shared=True),
    "POST /v1/oauth/login_authorization": Row(ANYONE),
    "POST /v1/oauth/login_token": Row(ANYONE),
    "GET /v1/login-requests/{user_code}": Row("tokens:write", shared=True),
    "POST /v1/login-requests/{user_code}/approve": Row("tokens:write", shared=True),
    "POST /v1/login-requests/{user_code}/deny": Row("tokens:write", shared=True),
    "POST /v1/jobs": Row("jobs:write", job_request()),
    "GET /v1/jobs": Row("jobs:read"),
    "GET /v1/jobs/{job_id}": Row("jobs:read"),
    "GET /v1/jobs/{job_id}/waiting": Row("jobs:read"),
    "POST /v1/jobs/{job_id}/cancel": Row("jobs:write"),
    "GET /v1/jobs/{job_id}/events": Row("jobs:read"),
    "POST /v1/leases": Row(DEVICE, {"datasets": []}),
    "POST /v1/leases/{lease_id}/heartbeat": Row(DEVICE, {"phase": "training"}),
    "POST /v1/leases/{lease_id}/fail": Row(DEVICE, {"code": "x", "detail": "y"}),
    "POST /v1/leases/{lease_id}/release": Row(DEVICE),
    "POST /v1/leases/{lease_id}/leave": Row(DEVICE),
    "POST /v1/leases/{lease_id}/decline": Row(DEVICE, {"needed_bytes": 2, "available_bytes": 1}),
    "PUT /v1/leases/{lease_id}/adapter": Row(DEVICE, b"bytes"),
    "GET /v1/leases/{lease_id}/start": Row(DEVICE),
    "PUT /v1/leases/{lease_id}/trajectory": Row(DEVICE, b"bytes"),
    "POST /v1/leases/{lease_id}/complete": Row(DEVICE, {"adapter_sha256": "0" * 64, "result": result()}),
    "GET /v1/leases/{lease_id}/masking": Row(DEVICE, owner=409),
    "POST /v1/leases/{lease_id}/masking/keys": Row(DEVICE, KEYS),
    "POST /v1/leases/{lease_id}/masking/shares": Row(DEVICE, {"sealed": "", "commitment": BASE64}),
    "PUT /v1/leases/{lease_id}/masking/vector": Row(DEVICE, b"bytes"),
    "POST /v1/leases/{lease_id}/masking/consent": Row(DEVICE, {"signature": SIGNED}),
    "POST /v1/leases/{lease_id}/masking/unmask": Row(DEVICE, {"seeds": "", "keys": ""}),
    "GET /v1/programs/{recipe_id}": Row("jobs:read"),
    "GET /v1/files/{sha256}": Row(EITHER + "jobs:read"),
    "GET /v1/runner-builds/{platform}": Row(DEVICE, shared=True),
    "GET /v1/runner-builds/{platform}/{sha256}": Row(DEVICE, shared=True),
    "GET /v1/bases": Row("jobs:read", shared=True),
    "GET /v1/calibrations": Row("jobs:read"),
    "GET /v1/users/{user}/privacy": Row("jobs:read", shared=True),
    "PUT /v1/users/{user}/privacy": Row("privacy:write", {"epsilon": 8}, shared=True),
    "POST /v1/score": Row("adapters:score", {"rows": [{"adapter": "a", "prompt": "a", "answers": ["x"]}]}),
    "POST /v1/generate": Row("adapters:score", {"adapter": "a", "prompt": "a"}),
    "GET /v1/models": Row("adapters:score"),
    "GET /v1/models/{model}": Row("adapters:score"),
    "POST /v1/completions": Row("adapters:score", {"model": "a", "prompt": "a"}),
    "POST /v1/chat/completions": Row("adapters:score", {"model": "a", "messages": [{"role": "user", "content": "a"}]}),
    "GET /v1/adapters": Row("adapters:read"),
    "GET /v1/adapters/{name}": Row("adapters:read"),
    "GET /v1/adapters/{name}/devices": Row("adapters:read"),
    "PUT /v1/adapters/{name}/devices/{device_id}": Row("adapters:write"),
    "DELETE /v1/adapters/{name}/devices/{device_id}": Row("adapters:write"),
    "GET /v1/devices/self/adapters/{name}/{revision}": Row(DEVICE),
    "GET /v1/devices/self/adapters/{name}/{revision}/lora_B.safetensors": Row(DEVICE),
    "DELETE /v1/adapters/{name}": Row("adapters:write"),
    "POST /v1/adapters/{name}/undelete": Row("adapters:write"),
    "POST /v1/adapters/{name}/promote": Row("adapters:write", {"revision": "v1"}),
    "POST /v1/adapters/{name}/rollback": Row("adapters:write", {}),
    "PUT /v1/adapters/{name}/tags/{tag}": Row("adapters:write", {"revision": "v1"}),
    "DELETE /v1/adapters/{name}/tags/{tag}": Row("adapters:write"),
    "GET /v1/adapters/{name}/events": Row("adapters:read"),
    "GET /v1/adapters/{name}/compare": Row("adapters:read", query="left=v1&right=v1"),
    "GET /v1/adapters/{name}/rule": Row("adapters:read"),
    "PUT /v1/adapters/{name}/rule": Row("adapters:write", {"rule": None}),
    "GET /v1/approval-rule": Row("adapters:read"),
    "PUT /v1/approval-rule": Row("adapters:write", {"rule": None}),
    "GET /v1/adapters/{name}/revisions/{revision}": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}": Row("adapters:read"),
    "DELETE /v1/adapters/{name}/versions/{version}": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/undelete": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/approve": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/reject": Row("adapters:write"),
    "POST /v1/adapters/{name}/versions/{version}/deprecate": Row("adapters:write", {"message": "old"}),
    "GET /v1/adapters/{name}/versions/{version}/lora_B.safetensors": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/trajectory": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/trajectory.bin": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/steps/{step}/lora_B.safetensors": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/peft": Row("adapters:read"),
    "POST /v1/adapters/{name}/versions/{version}/merged": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/merged": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/merged/{file}": Row("adapters:read"),
    "GET /v1/adapters/{name}/versions/{version}/peft/{file}": Row("adapters:read"),
    "POST /v1/cohorts": Row("cohorts:write", cohort_request()),
    "GET /v1/cohorts": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}/privacy": Row("cohorts:read"),
    "GET /v1/cohorts/{cohort_name}/members": Row("cohorts:read"),
    "PUT /v1/cohorts/{cohort_name}/members/{user}": Row("cohorts:write", {"device": "device_none"}),
    "DELETE /v1/cohorts/{cohort_name}/members/{user}": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds": Row("cohorts:read"),
    "POST /v1/cohorts/{cohort_name}/rounds": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds/{number}": Row("cohorts:read"),
    "POST /v1/cohorts/{cohort_name}/rounds/{number}/close": Row("cohorts:write"),
    "GET /v1/cohorts/{cohort_name}/rounds/{number}/updates": Row("cohorts:read"),
    "GET /": Row(SESSION),
    "GET /ui/login": Row(ANYONE),
    "POST /ui/login": Row(ANYONE, FORM),
    "POST /ui/logout": Row(SESSION, FORM),
    "GET /ui/activate": Row(SESSION + " tokens:write"),
    "POST /ui/activate": Row(SESSION + " tokens:write", FORM),
    "GET /ui/static/{name}": Row(ANYONE),
    "GET /ui/{anything}": Row(SESSION),
    "GET /ui/jobs": Row(SESSION + " jobs:read"),
    "GET /ui/jobs/new": Row(SESSION + " jobs:write"),
    "POST /ui/jobs/new": Row(SESSION + " jobs:write", FORM),
    "GET /ui/jobs/{job_id}": Row(SESSION + " jobs:read"),
    "GET /ui/jobs/{job_id}/events": Row(SESSION + " jobs:read"),
    "POST /ui/jobs/{job_id}/cancel": Row(SESSION + " jobs:write", FORM),
    "GET /ui/compare": Row(SESSION + " jobs:read"),
    "GET /ui/devices": Row(SESSION + " devices:read"),
    "GET /ui/devices/join": Row(SESSION + " devices:write"),
    "POST /ui/devices/join": Row(SESSION + " devices:write", FORM),
    "GET /ui/devices/{device_id}": Row(SESSION + " devices:read"),
    "POST /ui/devices/{device_id}/revoke": Row(SESSION + " devices:write", FORM),
    "GET /ui/adapters": Row(SESSION + " adapters:read"),
    "GET /ui/adapters/{name}": Row(SESSION + " adapters:read"),
    "GET /ui/adapters/{name}/compare": Row(SESSION + " adapters:read"),
    "POST /ui/adapters/{name}/rollback": Row(SESSION + " adapters:write", FORM),
    "GET /ui/adapters/{name}/versions/{version}": Row(SESSION + " adapters:read"),
    "POST /ui/adapters/{name}/versions/{version}/choose": Row(SESSION + " adapters:score", FORM),
    "POST /ui/adapters/{name}/versions/{version}/try": Row(SESSION + " adapters:score", FORM),
    "POST /ui/adapters/{name}/versions/{version}/approve": Row(SESSION + " adapters:write", FORM),
    "POST /ui/adapters/{name}/versions/{version}/reject": Row(SESSION + " adapters:write", FORM),
    "POST /ui/adapters/{name}/versions/{version}/promote": Row(SESSION + " adapters:write", FORM),
    "GET /ui/cohorts": Row(SESSION + " cohorts:read"),
    "GET /ui/cohorts/{cohort_name}": Row(SESSION + " cohorts:read"),
    "GET /ui/cohorts/{cohort_name}/rounds/{number}": Row(SESSION + " cohorts:read"),
    "POST /ui/cohorts/{cohort_name}/rounds": Row(SESSION + " cohorts:write", FORM),
    "POST /ui/cohorts/{cohort_name}/rounds/{number}/close": Row(SESSION + " cohorts:write", FORM),
    "GET /ui/programs": Row(SESSION + " jobs:read"),
    "GET /ui/programs/{recipe_id}": Row(SESSION + " jobs:read"),
    "GET /ui/operations": Row(SESSION),
    "GET /ui/operations/tokens": Row(SESSION + " tokens:write"),
    "POST /ui/operations/tokens/{token_id}/revoke": Row(SESSION + " tokens:write", FORM),
    "GET /ui/operations/audit": Row(SESSION + " adapters:read"),
    "GET /api/whoami-v2": Row(PERSON),
    "GET /api/models": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/revision/{revision}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/tree/{revision}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/tree/{revision}/{path}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/refs": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/commits/{revision}": Row("adapters:read"),
    "GET /api/models/{tenant}/{name}/auth-check": Row("adapters:read"),
    "POST /api/models/{tenant}/{name}/paths-info/{revision}": Row("adapters:read", b"paths=README.md"),
    "GET /{tenant}/{name}/resolve/{revision}/{path}": Row("adapters:read"),
}
# The pages that describe the API: plain routes of FastAPI's, open to all, about no tenant.
PAGES = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
HERE = "add it to ROWS in tests/server/identity/test_matrix.py, with who may ask it"

# What a path may name: nothing of the sort here, and (in `theirs`) a thing of tenant `default`.
ABSENT = {
    "job_id": "job_none",
    "lease_id": "lease_none",
    "device_id": "device_none",
    "token_id": "token_none",
    "recipe_id": "0" * 64,
    "sha256": "0" * 64,
    "name": "nothing",
    "model": "nothing",
    "cohort_name": "nothing",
    "version": "1",
    "number": "1",
    "step": "1",
    "revision": "main",
    "tag": "stable",
    "file": "README.md",
    "tenant": "default",
    "path": "README.md",
    "platform": "linux-x86_64",
    "user_code": "AAAA-AAAA",
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
    found = {route.name for route in routes}
    assert set(ROWS) <= found, "rows of routes that are no more"
    described = {f"{method.upper()} {path}" for path, item in standing[0].openapi()["paths"].items() for method in item}
    assert described <= found, "the walk over the routes missed some"


def test_a_route_without_a_rule_is_found():
    app = FastAPI()
    router, inner = APIRouter(prefix="/v1"), APIRouter()
    router.get("/forgotten")(lambda: None)
    inner.get("/nested")(lambda: None)
    router.include_router(inner)
    app.include_router(router)
    app.mount("/mounted", FastAPI(openapi_url=None))
    late = APIRouter()

    @late.get("/late")
    def lately(session: Reading, principal: DeviceCaller) -> None: ...

    app.include_router(late)
    text = "\n".join(complaints(app))
    for path in ("/v1/forgotten has 0", "/v1/nested has 0", "/mounted has 0", "/late begins", "/late has no row"):
        assert path in text


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
            allowed = who == DEVICE or who.startswith(EITHER)
        else:
            allowed = who in (PERSON, PERSON_OR_DEVICE) or who.removeprefix(EITHER) in self.scopes
        return None if allowed else (403, "forbidden")


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
    }
)


@pytest.fixture
def callers(fleet, home):
    """Every kind of caller, by a name."""
    unauthorized = (401, "unauthorized")
    suspended = (403, "tenant-suspended")

    def issued(role, tenant="default", **options):
        with home.database.writing() as session:
            token, text = TokenService(session).issue(role, tenant, "", **options)
        return token, text

    _, expired = issued(Role.OPERATOR, lifetime=timedelta(seconds=-1))
    revoked, revoked_text = issued(Role.OPERATOR)
    _, unknown = issued(Role.OPERATOR)
    lost = fleet.device(name="lost")
    shut = [fleet.operator("shut"), fleet.app("shut"), fleet.device("shut")]
    with home.database.writing() as session:
        TokenService(session).revoke(revoked.id)
        bob = UserService(session).create("default", "bob", Role.OPERATOR)
        _, bobs = TokenService(session).issue(Role.OPERATOR, "default", "", user=bob)
        UserService(session).disable("default", "bob")
        DeviceService(session).revoke("default", lost.device_id)
        TenantService(session).suspend("shut")
    found = {
        "nobody": Caller(fleet.actor(), unauthorized),
        "nonsense": Caller(fleet.actor("nonsense"), unauthorized),
        "a token never issued": Caller(fleet.actor(unknown[:-4] + "AAAA"), unauthorized),
        "an expired token": Caller(fleet.actor(expired), unauthorized),
        "a revoked token": Caller(fleet.actor(revoked_text), unauthorized),
        "a disabled user": Caller(fleet.actor(bobs), unauthorized),
        "a revoked device": Caller(lost, unauthorized),
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
        _, text = issued(Role.OPERATOR, scopes=[Scope(scope)])
        found[f"only {scope}"] = Caller(fleet.actor(text), scopes=frozenset({scope}))
    return found


def ask(actor, route, row, names):
    """One request; HEAD's as GET's, its answer without a body."""
    options = {"content": row.body} if isinstance(row.body, bytes) else {"json": row.body}
    if row.body is None:
        options = {}
    path = route.path.format_map(names)
    return actor.request(route.method, f"{path}?{row.query}" if row.query else path, **options)


def code_of(answer):
    """The code of a refusal; OpenAI's routes have OpenAI's form and word for a wrong token."""
    found = answer.json()
    code = found["error"]["code"] if "error" in found else found.get("code")
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
    assert app.post("/v1/adapters/alice-movies/versions/1/merged").status_code == 202
    with home.database.writing() as session:
        # No worker is here to make it.
        merged = session.scalars(select(Conversion)).one()
        merged.state, merged.ready_at = ConversionState.READY, utc_now()
        sha256 = home.artifacts.put(b"merged")
        session.add(ConversionFile(conversion_number=merged.number, path="README.md", size=6, sha256=sha256))
    fleet.ready_job(app, start={"adapter": lease["job"]["request"]["adapter"]})
    assert app.post("/v1/cohorts", json=cohort_request(quorum=1)).status_code == 201
    assert app.put("/v1/cohorts/readers/members/alice", json={"device": device.device_id}).status_code == 200
    assert app.post("/v1/cohorts/readers/rounds").status_code == 201
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
    }


def told(answer, names):
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
        for stranger in (found.actor for found in strangers if found.expected(row.who) is None):
            answer = ask(stranger, route, row, theirs)
            if "{" in route.path and not row.shared:
                assert answer.status_code == 404, (route.name, answer.text)
                assert told(answer, theirs) == told(ask(stranger, route, row, ABSENT), ABSENT), route.name
            else:
                for thing in ("job_id", "lease_id", "device_id", "token_id"):
                    assert theirs[thing] not in answer.text, route.name
        if route.method in ("GET", "HEAD") and "{" in route.path and not row.shared:
            owner = device if row.who == DEVICE else app
            if row.who.removeprefix(EITHER) in OF_APP or row.who == DEVICE:
                assert ask(owner, route, row, theirs).status_code == row.owner, route.name
