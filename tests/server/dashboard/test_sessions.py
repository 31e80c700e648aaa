"""Signing in and out: cookies, CSRF, and rate limits. What a stranger gets: tests/server/identity/test_matrix.py."""

import asyncio
from datetime import timedelta

import httpx
import pytest
from sqlalchemy import select

from server.dashboard.pages import return_path
from server.dashboard.sessions import WebSession
from server.database.columns import utc_now
from server.identity.tenants import TenantService
from shared.access import Role
from tests.server.dashboard.people import Person
from tests.server.homes import Home


@pytest.mark.both_databases
def test_a_session_begins_with_a_token_and_ends_with_the_person_or_the_token(person, home):
    someone = person(sign_in=False)
    answer = someone.sign_in(someone.token, "/ui/jobs?state=ready")
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/jobs?state=ready")
    cookie = next(each for each in answer.headers.get_list("set-cookie") if each.startswith("mobizo_session="))
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert someone.token not in str(answer.headers)
    assert someone.get("/ui/jobs").status_code == 200
    secret = someone.cookies["mobizo_session"]
    assert secret not in home.scalars(select(WebSession.digest))
    assert someone.act("/ui/logout").headers["location"] == "/ui/login?note=signed-out"
    # Whoever copied the cookie has nothing either.
    someone.cookies.set("mobizo_session", secret)
    assert someone.get("/").headers["location"].startswith("/ui/login")


def expire(home, token):
    home.change(WebSession, expires_at=utc_now() - timedelta(seconds=1))


@pytest.mark.parametrize("end", [Home.revoke_token, expire])
def test_a_revoked_token_and_an_old_session_lead_to_the_login_page_and_back(person, home, end):
    someone = person()
    page = someone.get("/ui/jobs/new")
    end(home, someone.token)
    assert someone.get("/ui/jobs?user=alice").headers["location"] == "/ui/login?next=/ui/jobs%3Fuser%3Dalice"
    assert someone.send_form("/ui/jobs/new", page).headers["location"] == "/ui/login?next=/ui/jobs/new"
    part = someone.get("/", headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["hx-refresh"]) == (204, "true")
    events = someone.get("/ui/jobs/job_x/events", headers={"Accept": "text/event-stream"})
    assert events.status_code == 401


def test_a_suspended_tenant_gets_a_page_that_says_so(person, home):
    someone = person(tenant="shut")
    with home.database.writing() as session:
        TenantService(session).suspend("shut")
    answer = someone.get("/")
    assert answer.status_code == 403
    assert "Ask the operator of this server" in answer.text


@pytest.mark.parametrize("token", ["nonsense", "mobizo-operator-" + "x" * 43, ""])
def test_a_wrong_token_is_refused_with_words(person, token):
    answer = person(sign_in=False).sign_in(token)
    assert answer.status_code == 401
    assert "not known here" in answer.text
    assert 'role="alert"' in answer.text


def test_a_device_cannot_sign_in(fleet, person):
    answer = person(sign_in=False).sign_in(fleet.device().token)
    assert answer.status_code == 403
    assert "device" in answer.text


def test_forms_of_other_sites_are_refused(person, home):
    someone, other = person(), person()
    foreign = other.get("/")
    for fields in ({"x": ""}, {"csrf": ""}, {"csrf": "0" * 80}, {"csrf": "é" * 80}):
        answer = someone.post("/ui/logout", data=fields)
        assert answer.status_code == 403
        assert "reload the page" in answer.text
    assert someone.send_form("/ui/logout", foreign).status_code == 403
    assert someone.get("/").status_code == 200
    # Not even a person can be signed in by another site.
    stranger = person(sign_in=False)
    stranger.get("/ui/login")
    assert stranger.post("/ui/login", data={"token": stranger.token, "csrf": "0" * 80}).status_code == 403
    fresh = person(sign_in=False)
    assert fresh.post("/ui/login", data={"token": fresh.token}).status_code == 403
    assert "mobizo_session" not in fresh.cookies


def test_guessing_tokens_meets_the_limit_of_refusals(fleet, home, monkeypatch):
    monkeypatch.setattr("server.web.state.REFUSAL_RATE", 0.001)
    monkeypatch.setattr("server.web.state.REFUSAL_BURST", 3)
    stranger = Person(fleet.url)
    answers = [stranger.sign_in(f"mobizo-app-{number:043}") for number in range(5)]
    assert [answer.status_code for answer in answers] == [401, 401, 401, 429, 429]
    assert int(answers[-1].headers["retry-after"]) > 0
    assert stranger.sign_in(home.token(Role.APP)).status_code == 429
    stranger.close()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/ui/jobs?user=a", "/ui/jobs?user=a"),
        ("/", "/"),
        ("//evil.example/ui/", "/"),
        ("https://evil.example/ui/jobs", "/"),
        ("/\\evil.example", "/"),
        ("/ui/\\evil", "/"),
        ("/ui/jobs\r\nSet-Cookie: x=y", "/"),
        ("javascript:alert(1)", "/"),
        ("/v1/jobs", "/"),
        ("/ui/login?next=/ui/login", "/"),
        ("/ui/logout", "/"),
        ("http://[", "/"),
        ("", "/"),
    ],
)
def test_signing_in_leads_to_pages_of_this_server_only(address, expected):
    assert return_path(address) == expected


def test_a_cookie_over_tls_is_secure(fleet, standing):
    app, _ = standing

    async def as_tls(scope, receive, send):
        await app(scope | {"scheme": "https"} if scope["type"] == "http" else scope, receive, send)

    async def cookie(application):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(application), base_url="http://x") as client:
            return (await client.get("/ui/login")).headers["set-cookie"]

    assert "Secure" in asyncio.run(cookie(as_tls))
    assert "Secure" not in asyncio.run(cookie(app))
