"""All routes of the dashboard: signing in and out, static files, and the pages of its parts."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Query, Request, Response

from server.dashboard import adapters, cohorts, decisions, devices, jobs, logins, operations, overview, programs, runs
from server.dashboard.access import COOKIE, FORM_BODY, LOGIN_COOKIE, Fields, check_csrf, read_form, signed_in
from server.dashboard.assets import asset_response
from server.dashboard.pages import LOGIN, page, redirect, return_path
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import SessionService, Visitor, csrf_token, is_secret, new_secret
from server.database.columns import utc_now
from server.identity.access_rules import PUBLIC
from server.identity.tokens import token_digest
from server.web.state import AppState, State, address_of
from shared.errors import Forbidden, NotFound, Unauthorized

LOGIN_SECONDS = 3600  # that a login page may wait to be filled in
MOST_TOKEN = 200  # characters of a token
Next = Annotated[str, Query(max_length=2000)]

pages = PageRoutes()


def _login_page(request: Request, target: str, problem: str | None = None, status: int = 200) -> Response:
    known = request.cookies.get(LOGIN_COOKIE, "")
    secret = known if is_secret(known) else new_secret()
    response = page(
        request, None, "login.html", "Sign in", status, target=target, problem=problem, form_token=csrf_token(secret)
    )
    _set_cookie(request, response, LOGIN_COOKIE, secret, LOGIN_SECONDS)
    return response


def _set_cookie(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


@pages.get(LOGIN, dependencies=[PUBLIC])
async def login_page(request: Request, next: Next = "/") -> Response:
    """The page on which a person signs in with a token."""
    return _login_page(request, return_path(next))


@pages.post(LOGIN, dependencies=[PUBLIC], openapi_extra=FORM_BODY)
async def login(request: Request, state: State) -> Response:
    """Begins a session, and shows the page that the person wanted."""
    fields = await read_form(request)
    target = return_path(fields.get("next", "/"))
    secret = request.cookies.get(LOGIN_COOKIE, "")
    if not is_secret(secret):
        return _login_page(request, target, "The page was open for too long, or cookies are blocked. Try again.", 403)
    check_csrf(secret, fields)
    token = fields.get("token", "").strip()[:MOST_TOKEN]
    digest, address = token_digest(token), address_of(request)
    state.limits.before(digest, address)
    try:
        session, expires = await state.write_queue.run(_begin, state, token)
    except Unauthorized as error:
        state.limits.refused(digest, address)
        return _login_page(request, target, error.detail, 401)
    except Forbidden as error:
        return _login_page(request, target, error.detail, 403)
    state.limits.good(digest)
    response = redirect(target)
    _set_cookie(request, response, COOKIE, session, int((expires - utc_now()).total_seconds()))
    response.delete_cookie(LOGIN_COOKIE, path="/")
    return response


def _begin(state: AppState, token: str) -> tuple[str, datetime]:
    with state.database.writing() as session:
        return SessionService(session).begin(token)


@pages.post("/ui/logout", openapi_extra=FORM_BODY)
async def logout(visitor: Annotated[Visitor, signed_in()], form: Fields, state: State) -> Response:
    """Ends the session."""
    await state.write_queue.run(_end, state, visitor.secret)
    response = redirect(LOGIN, "signed-out")
    response.delete_cookie(COOKIE, path="/")
    return response


def _end(state: AppState, secret: str) -> None:
    with state.database.writing() as session:
        SessionService(session).end(secret)


@pages.get("/ui/static/{name}", dependencies=[PUBLIC])
async def static_file(request: Request, name: str) -> Response:
    """A static file of the pages."""
    return asset_response(request, name)


@pages.get("/ui/{anything}")
async def unknown_page(visitor: Annotated[Visitor, signed_in()], anything: str) -> Response:
    """Says that there is no such page, to people with a session only."""
    raise NotFound("there is no such page")


class _Parts:
    """Collects the routes in the order in which they are tried."""

    def __init__(self, *parts: PageRoutes) -> None:
        self.routes = [route for part in parts for route in part.routes]


router = _Parts(
    overview.router,
    jobs.router,
    runs.router,
    devices.router,
    adapters.router,
    decisions.router,
    cohorts.router,
    programs.router,
    operations.router,
    logins.router,
    pages,
)
