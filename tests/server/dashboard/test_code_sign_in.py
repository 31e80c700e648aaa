"""Signing in with a code: what the browser gets, what the person decides, and what a wrong cookie gets."""

import re
from datetime import timedelta

import pytest
from sqlalchemy import select, update

from server.dashboard.sessions import WebSession
from server.database.columns import utc_now
from server.identity.logins.service import WAITING_PER_ADDRESS, LoginRequest
from server.identity.tokens import Token, TokenService
from shared.access import Role, Scope
from tests.server.dashboard.people import Person

PAGE = "/ui/login/code"
CODE = re.compile(r"mobizo token approve ([0-9A-Z]{4}-[0-9A-Z]{4})")


@pytest.fixture
def stranger(fleet):
    with Person(fleet.url) as person:
        yield person


def ask(stranger, target="/ui/jobs?state=ready"):
    """Asks for a code; returns the code that the page shows."""
    answer = stranger.act(PAGE, "/ui/login", next=target)
    assert answer.status_code == 303, answer.text
    page = stranger.get(answer.headers["location"])
    assert page.status_code == 200
    assert '<noscript><meta http-equiv="refresh"' in page.text
    return CODE.search(page.text)[1]


def cookies(answer):
    return {each.partition("=")[0]: each for each in answer.headers.get_list("set-cookie")}


@pytest.mark.both_databases
def test_a_confirmed_code_begins_a_session_as_a_token_does(stranger, operator, fleet, home, person):
    response = stranger.act(PAGE, "/ui/login", next="/ui/jobs?state=ready")
    cookie = {part.strip() for part in cookies(response)["mobizo_login_code"].split(";")}
    assert {"HttpOnly", "SameSite=strict", "Max-Age=900"} <= cookie
    address = response.headers["location"]
    code = CODE.search(stranger.get(address).text)[1]
    for _ in range(3):  # a page that asks often is not told to slow down
        assert CODE.search(stranger.get(address).text)[1] == code
    assert operator.get(f"/v1/login-requests/{code}").json()["name"] == "dashboard in a browser"
    assert operator.post(f"/v1/login-requests/{code}/approve").status_code == 200
    part = stranger.get(address, headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-refresh"]) == (204, "true")
    answer = stranger.get(address)
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/jobs?state=ready")
    session_cookies = cookies(answer)
    token_form = person(sign_in=False)
    by_token = cookies(token_form.sign_in(token_form.token))["mobizo_session"]
    strip = re.compile(r"=[\w-]{43}|Max-Age=\d+")
    assert strip.sub("", session_cookies["mobizo_session"]) == strip.sub("", by_token)
    assert all("Max-Age=0" in session_cookies[name] for name in ("mobizo_login", "mobizo_login_code"))
    assert "mobizo-" not in str(answer.headers)  # no token, no device code
    assert stranger.get("/ui/jobs").status_code == 200
    with home.database.reading() as session:
        token = session.scalars(select(Token).where(Token.name == "dashboard in a browser")).one()
        assert token.expires_at - token.created_at == timedelta(days=1)
    # The session ends with its token, which the tokens' page lists.
    assert operator.delete(f"/v1/tokens/{token.id}").status_code in (200, 204)
    assert stranger.get("/ui/jobs").headers["location"].startswith("/ui/login")


def test_a_person_grants_a_session_fewer_scopes(stranger, operator):
    code = ask(stranger)
    operator.post(f"/v1/login-requests/{code}/approve", json={"scopes": ["jobs:read"]})
    assert stranger.get(PAGE).status_code == 303
    assert stranger.get("/ui/jobs").status_code == 200
    assert stranger.get("/ui/devices").status_code == 403


def expire(operator, home, code):
    with home.database.writing() as session:
        session.execute(update(LoginRequest).values(expires_at=utc_now() - timedelta(seconds=1)))


def deny(operator, home, code):
    operator.post(f"/v1/login-requests/{code}/deny")


def revoke(operator, home, code):
    operator.post(f"/v1/login-requests/{code}/approve")
    with home.database.writing() as session:
        tokens = TokenService(session)
        tokens.revoke(tokens.principal(operator.token).token_id)


@pytest.mark.parametrize(
    ("end", "words"),
    [(expire, "Nobody confirmed the code in time"), (deny, "The login was refused"), (revoke, "does not allow it")],
)
def test_a_code_that_ended_leads_to_the_login_page_with_words(stranger, operator, home, end, words):
    end(operator, home, ask(stranger))
    answer = stranger.get(PAGE, params={"next": "/ui/jobs"})
    assert answer.status_code == 401
    assert words in answer.text
    assert 'value="/ui/jobs"' in answer.text
    assert {"mobizo_login_code", "mobizo_session"} & set(stranger.cookies) == set()
    with home.database.reading() as session:
        assert session.scalars(select(WebSession)).all() == []


def test_a_wrong_cookie_gets_nothing(stranger, operator, fleet, home):
    code = ask(stranger)
    operator.post(f"/v1/login-requests/{code}/approve")
    device_code = stranger.cookies["mobizo_login_code"].partition(".")[0]
    login = {"client_id": "mobizo", "client_name": "a program"}
    program = fleet.actor().post("/v1/oauth/login_authorization", data=login).json()
    operator.post(f"/v1/login-requests/{program['user_code']}/approve")
    for value, status in (
        ("", 303),
        (device_code, 303),
        (f"{device_code}.<script>", 303),
        (f"{'x' * 201}.{code}", 303),
        (f"{device_code[:-4]}AAAA.{code}", 401),
        (f"{program['device_code']}.{code}", 401),  # of another client
    ):
        with Person(fleet.url) as other:
            answer = other.get(PAGE, headers={"Cookie": f"mobizo_login_code={value}"})
            assert answer.status_code == status, value
            assert status == 401 or answer.headers["location"] == "/ui/login?next=/"
            assert "mobizo_session" not in other.cookies
    assert stranger.get(PAGE).status_code == 303
    with Person(fleet.url) as late:  # a copy of the cookie, after its use
        answer = late.get(PAGE, headers={"Cookie": f"mobizo_login_code={device_code}.{code}"})
        assert (answer.status_code, "was used" in answer.text) == (401, True)


def test_forms_of_other_sites_get_no_code_and_a_browser_gets_one_at_once(stranger, fleet, home):
    with Person(fleet.url) as other:
        assert other.post(PAGE, data={"csrf": "0" * 80}).status_code == 403
        other.get("/ui/login")
        assert other.post(PAGE, data={"csrf": "0" * 80}).status_code == 403
    assert ask(stranger) == ask(stranger)
    with home.database.reading() as session:
        assert len(session.scalars(select(LoginRequest)).all()) == 1
    for _ in range(WAITING_PER_ADDRESS - 1):
        with Person(fleet.url) as another:
            ask(another)
    with Person(fleet.url) as second_person:
        answer = second_person.act(PAGE, "/ui/login", next="/")
        assert answer.status_code == 429
        assert "Too many logins of this address wait" in answer.text
        assert second_person.sign_in(home.token(Role.OPERATOR)).status_code == 303


def test_who_may_not_create_tokens_confirms_no_code(stranger, app, home, fleet):
    code = ask(stranger)
    assert app.post(f"/v1/login-requests/{code}/approve").status_code == 403
    with home.database.writing() as session:
        _, text = TokenService(session).issue(
            Role.OPERATOR, "default", "", scopes=[Scope.JOBS_READ], lifetime=timedelta(hours=1)
        )
    assert fleet.actor(text).post(f"/v1/login-requests/{code}/approve").status_code == 403
    assert stranger.get(PAGE).status_code == 200
