"""The page on which a person signs in with a token, which is exchanged for a session."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response

from server.dashboard.access import COOKIE, LOGIN_COOKIE, check_csrf, read_form
from server.dashboard.pages import LOGIN, page, redirect, return_path
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import SessionService, csrf_token, is_secret, new_secret
from server.database.columns import utc_now
from server.identity.access_rules import PUBLIC
from server.identity.tokens import token_digest
from server.web.state import State, address_of
from shared.errors import Forbidden, Unauthorized

LOGIN_SECONDS = 3600  # that a login page may wait to be filled in
MAX_TOKEN = 200  # characters
TOO_LATE = "The page was open for too long, or cookies are blocked. Try again."
Next = Annotated[str, Query(max_length=2000)]

router = PageRoutes()


def _login_page(request: Request, target: str, problem: str | None = None, status: int = 200) -> Response:
    cookie = request.cookies.get(LOGIN_COOKIE, "")
    secret = cookie if is_secret(cookie) else new_secret()
    response = page(
        request,
        None,
        "login.html",
        "Sign in",
        status,
        target=target,
        problem=problem,
        form_token=csrf_token(secret),
    )
    _set_cookie(request, response, LOGIN_COOKIE, secret, LOGIN_SECONDS)
    return response


def _set_cookie(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


@router.get(LOGIN, dependencies=[PUBLIC])
async def login_page(request: Request, next: Next = "/") -> Response:
    """The page on which a person signs in with a token."""
    return _login_page(request, return_path(next))


@router.post(LOGIN, dependencies=[PUBLIC])
async def login(request: Request, state: State) -> Response:
    """Begins a session, and shows the page that the person wanted."""
    fields = await read_form(request)
    target = return_path(fields.get("next", "/"))
    secret = request.cookies.get(LOGIN_COOKIE, "")
    if not is_secret(secret):
        return _login_page(request, target, TOO_LATE, 403)
    check_csrf(secret, fields)
    token = fields.get("token", "").strip()[:MAX_TOKEN]
    try:
        with state.limits.checking(token_digest(token), address_of(request)):
            session, expires = await state.write_queue.transact(lambda session: SessionService(session).begin(token))
    except Unauthorized as error:
        return _login_page(request, target, error.detail, 401)
    except Forbidden as error:
        return _login_page(request, target, error.detail, 403)
    response = redirect(target)
    _set_cookie(request, response, COOKIE, session, int((expires - utc_now()).total_seconds()))
    response.delete_cookie(LOGIN_COOKIE, path="/")
    return response
