"""Who may do what."""

import pytest

from server.auth.service import TokenService


def test_no_token(fleet, problem):
    response = fleet.actor().get("/v1/jobs")
    problem(response, 401, "unauthorized")
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("value", ["Bearer", "Basic eDp5", "Bearer nonsense", f"Bearer mobizo-app-{'x' * 43}"])
def test_tokens_that_are_none(fleet, problem, value):
    problem(fleet.actor().get("/v1/jobs", headers={"Authorization": value}), 401, "unauthorized")


def test_a_revoked_token_ends_at_once(fleet, home, problem):
    with home.database.writing() as session:
        token, text = TokenService(session).issue("app", "default", "")
    actor = fleet.actor(text)
    assert actor.get("/v1/jobs").status_code == 200
    with home.database.writing() as session:
        TokenService(session).revoke(token.id)
    problem(actor.get("/v1/jobs"), 401, "unauthorized")


OPERATOR_ONLY = [("POST", "/v1/enrolments"), ("GET", "/v1/devices"), ("GET", "/v1/server/usage")]
APP_ROUTES = [
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/x"),
    ("POST", "/v1/jobs/x/cancel"),
    ("GET", "/v1/jobs/x/events"),
    ("GET", f"/v1/programs/{'0' * 64}"),
    ("GET", "/v1/adapters"),
    ("GET", "/v1/adapters/x"),
    ("GET", "/v1/adapters/x/versions/1"),
    ("GET", "/v1/adapters/x/versions/1/lora_B.safetensors"),
    ("GET", "/v1/adapters/x/versions/1/peft"),
    ("GET", "/v1/adapters/x/versions/1/peft/README.md"),
]
DEVICE_ROUTES = [
    ("POST", "/v1/leases"),
    ("POST", "/v1/leases/x/heartbeat"),
    ("POST", "/v1/leases/x/fail"),
    ("POST", "/v1/leases/x/release"),
    ("POST", "/v1/leases/x/decline"),
    ("PUT", "/v1/leases/x/adapter"),
    ("POST", "/v1/leases/x/complete"),
    ("GET", "/v1/runners/linux-x86_64"),
    ("GET", f"/v1/runners/linux-x86_64/{'0' * 64}"),
]


def test_each_role_keeps_to_its_routes(fleet, app, operator, device, problem):
    for actor, forbidden in (
        (app, OPERATOR_ONLY + DEVICE_ROUTES),
        (operator, DEVICE_ROUTES),
        (device, OPERATOR_ONLY + APP_ROUTES),
    ):
        for method, path in forbidden:
            problem(actor.request(method, path), 403, "forbidden")
    for method, path in OPERATOR_ONLY + APP_ROUTES:
        assert operator.request(method, path).status_code not in (401, 403), path


def test_without_a_token_nothing_but_the_public_routes_answers(fleet, problem):
    nobody = fleet.actor()
    for method, path in OPERATOR_ONLY + APP_ROUTES + DEVICE_ROUTES:
        problem(nobody.request(method, path), 401, "unauthorized")
    for path in ("/v1/server", "/healthz", "/readyz", "/docs", "/openapi.json"):
        assert nobody.get(path).status_code == 200, path


def test_every_route_is_in_these_lists(app):
    listed = {path for _, path in OPERATOR_ONLY + APP_ROUTES + DEVICE_ROUTES}
    for path in app.get("/openapi.json").json()["paths"]:
        concrete = (
            path.replace("{job_id}", "x").replace("{lease_id}", "x").replace("{name}", "x").replace("{version}", "1")
        )
        concrete = concrete.replace("{file}", "README.md").replace("{recipe_id}", "0" * 64)
        if concrete.startswith("/v1/runners"):
            concrete = concrete.replace("{platform}", "linux-x86_64").replace("{sha256}", "0" * 64)
        public = concrete in ("/v1/server", "/healthz", "/readyz", "/v1/devices", "/v1/files/{sha256}")
        assert public or concrete in listed, path


def test_only_digests_are_stored(home):
    with home.database.writing() as session:
        token, text = TokenService(session).issue("app", "default", "mine")
        assert len(token.digest) == 64
    raw = b"".join(path.read_bytes() for path in home.settings.home.glob("*.sqlite3*"))
    assert text.encode() not in raw
    assert token.digest.encode() in raw
