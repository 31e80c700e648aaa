"""Logins by a code over HTTP: what a program gets, what the person decides, and what strangers cannot do."""

from datetime import timedelta

import pytest
from sqlalchemy import select, update

from server.identity.audit import AccessEvent
from server.identity.logins import service
from server.identity.logins.service import LoginRequest
from server.identity.quotas import Quota, QuotaService
from server.identity.tokens import TOKEN_DAYS, TokenService
from shared.access import Role, Scope
from tests.server.homes import at_once

GRANT = "urn:ietf:params:oauth:grant-type:device_code"
FIELDS = {"client_id": "mobizo", "client_name": "mobizo of alice@laptop"}


class Program:
    """A program that logs in, with a clock that the test turns."""

    def __init__(self, fleet):
        self.fleet, self.actor = fleet, fleet.actor()

    def ask(self, **changes):
        answer = self.actor.post("/v1/oauth/login_authorization", data=FIELDS | changes)
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        return answer.json()

    def poll(self, authorization, **changes):
        fields = {"grant_type": GRANT, "device_code": authorization["device_code"], "client_id": "mobizo"}
        return self.actor.post("/v1/oauth/login_token", data=fields | changes)

    def later(self, seconds):
        """Puts every request's times into the past."""
        with self.fleet.home.database.writing() as session:
            for request in session.scalars(select(LoginRequest)):
                request.expires_at -= timedelta(seconds=seconds)
                if request.polled_at is not None:
                    request.polled_at -= timedelta(seconds=seconds)


@pytest.fixture
def program(fleet):
    return Program(fleet)


def assert_refused(answer, error, status=400):
    assert answer.status_code == status, answer.text
    assert answer.headers["cache-control"] == "no-store"
    assert answer.json()["error"] == error, answer.text
    assert answer.json()["error_description"]


def path_of(authorization, action=""):
    return f"/v1/login-requests/{authorization['user_code']}{action}"


@pytest.mark.both_databases
def test_a_person_confirms_and_the_program_gets_one_token(fleet, home, program, operator):
    authorization = program.ask()
    assert (
        authorization["verification_uri_complete"] == f"{fleet.url}/ui/activate?user_code={authorization['user_code']}"
    )
    assert_refused(program.poll(authorization), "authorization_pending")
    assert_refused(program.poll(authorization), "slow_down")
    view = operator.get(path_of(authorization)).json()
    identity = operator.get("/v1/whoami").json()
    assert (view["name"], view["address"], view["state"]) == ("mobizo of alice@laptop", "127.0.0.1", "pending")
    assert view["scopes"] == identity["scopes"]
    for _ in range(2):
        assert operator.post(path_of(authorization, "/approve")).json()["state"] == "approved"
    program.later(20)
    answers = at_once(*(lambda: Program(fleet).poll(authorization) for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 400, 400, 400]
    for answer in answers:
        if answer.status_code == 400:
            assert answer.json()["error"] in ("invalid_grant", "slow_down")
    grant = next(answer.json() for answer in answers if answer.status_code == 200)
    assert (grant["token_type"], set(grant["scope"].split())) == ("Bearer", set(identity["scopes"]))
    assert 0 < grant["expires_in"] <= TOKEN_DAYS * 86_400
    whoami = fleet.actor(grant["access_token"]).get("/v1/whoami").json()
    assert (whoami["tenant"], whoami["role"], whoami["name"]) == ("default", "operator", "mobizo of alice@laptop")
    program.later(20)
    assert_refused(program.poll(authorization), "invalid_grant")
    with home.database.reading() as session:
        (row,) = session.scalars(select(LoginRequest))
        text = " ".join(str(getattr(row, column.key)) for column in LoginRequest.__table__.columns)
        (entry,) = session.scalars(select(AccessEvent))
    for code in (authorization["device_code"], authorization["user_code"], authorization["user_code"].replace("-", "")):
        assert code not in text
    assert (entry.action, entry.actor, entry.subject) == (
        "login-approved",
        identity["token_id"],
        "mobizo of alice@laptop",
    )


def test_a_login_beyond_the_quota_of_tokens_leaves_none_and_can_be_repeated(home, program, operator, problem):
    authorization = program.ask()
    assert operator.post(path_of(authorization, "/approve")).status_code == 200
    tokens = len(operator.get("/v1/tokens").json()["items"])
    for limit, refusals in ((tokens, 2), (tokens + 1, 0)):
        with home.database.writing() as session:
            QuotaService(session).set_limit("default", Quota.TOKENS, limit)
        for _ in range(refusals):
            problem(program.poll(authorization), 409, "quota-exceeded")
            assert len(operator.get("/v1/tokens").json()["items"]) == tokens
    assert program.poll(authorization).status_code == 200


def test_the_person_s_scopes_and_the_program_s_bound_the_token(fleet, program, operator, app, problem):
    authorization = program.ask(scope="jobs:read devices:read")
    assert operator.get(path_of(authorization)).json()["scopes"] == ["devices:read", "jobs:read"]
    problem(app.post(path_of(authorization, "/approve")), 403, "forbidden")
    with fleet.home.database.writing() as session:
        _, text = TokenService(session).issue(
            Role.OPERATOR, "default", "", scopes=[Scope.TOKENS_WRITE, Scope.JOBS_READ]
        )
    lesser = fleet.actor(text)
    assert lesser.get(path_of(authorization)).json()["scopes"] == ["jobs:read"]
    problem(lesser.post(path_of(authorization, "/approve"), json={"scopes": ["devices:read"]}), 403, "forbidden")
    assert lesser.post(path_of(authorization, "/approve")).json()["scopes"] == ["jobs:read"]
    assert program.poll(authorization).json()["scope"] == "jobs:read"
    second_authorization = program.ask()
    operator.post(path_of(second_authorization, "/approve"), json={"scopes": ["jobs:read"]})
    assert program.poll(second_authorization).json()["scope"] == "jobs:read"


def test_a_token_that_ends_before_the_program_asks_grants_nothing(fleet, home, program, operator):
    authorization = program.ask()
    operator.post(path_of(authorization, "/approve"))
    with home.database.writing() as session:
        TokenService(session).revoke(TokenService(session).principal(operator.token).token_id)
    assert_refused(program.poll(authorization), "access_denied")
    program.later(5)
    assert_refused(program.poll(authorization), "access_denied")


def test_a_refused_and_a_late_login(fleet, program, operator, problem):
    authorization = program.ask()
    assert operator.post(path_of(authorization, "/deny")).json()["state"] == "denied"
    problem(operator.post(path_of(authorization, "/approve")), 409, "conflict")
    problem(fleet.operator("other").get(path_of(authorization)), 404, "not-found")
    assert_refused(program.poll(authorization), "access_denied")
    late = program.ask()
    program.later(901)
    assert_refused(program.poll(late), "expired_token")
    problem(operator.post(path_of(late, "/approve")), 404, "not-found")
    program.later(3600)
    program.ask()
    assert_refused(program.poll(late), "invalid_grant")


def test_so_many_logins_wait_and_no_more(fleet, program, operator, monkeypatch):
    codes = [program.ask() for _ in range(10)]
    answer = program.actor.post("/v1/oauth/login_authorization", data=FIELDS)
    assert_refused(answer, "slow_down", 429)
    assert int(answer.headers["retry-after"]) > 0
    operator.post(path_of(codes[0], "/deny"))
    program.ask()
    with fleet.home.database.writing() as session:
        session.execute(update(LoginRequest).values(address="192.0.2.1"))
    monkeypatch.setattr(service, "WAITING_IN_ALL", 11)
    program.ask()
    assert_refused(program.actor.post("/v1/oauth/login_authorization", data=FIELDS), "slow_down", 429)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"client_id": ""}, "invalid_request"),
        ({"client_name": "x" * 97}, "invalid_request"),
        ({"client_name": "a\x1b[2Jb"}, "invalid_request"),
        ({"scope": "everything"}, "invalid_scope"),
    ],
)
def test_a_bad_request_leaves_nothing(fleet, program, changes, error):
    assert_refused(program.actor.post("/v1/oauth/login_authorization", data=FIELDS | changes), error)
    with fleet.home.database.reading() as session:
        assert session.scalars(select(LoginRequest)).all() == []


def test_a_bad_question(program, operator):
    authorization = program.ask()
    operator.post(path_of(authorization, "/approve"))
    assert_refused(program.poll(authorization, grant_type="authorization_code"), "unsupported_grant_type")
    assert_refused(program.poll(authorization, client_id="another"), "invalid_grant")
    assert_refused(program.poll(authorization, device_code="mobizo-login-x"), "invalid_grant")
    assert program.poll(authorization).status_code == 200
