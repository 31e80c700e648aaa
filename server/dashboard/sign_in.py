"""The pages on which a person signs in: with a token, or with a code that is confirmed where the person is signed in.

A code is a login request (RFC 8628) whose client is the browser. The browser holds both codes in a cookie that scripts
cannot read. The token that the confirmation grants is exchanged for the session at once, and its text is shown nowhere.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from urllib.parse import quote

from fastapi import Query, Request, Response
from fastapi.concurrency import run_in_threadpool

from server.dashboard.access import COOKIE, FORM_BODY, LOGIN_COOKIE, check_csrf, read_form
from server.dashboard.pages import LOGIN, page, redirect, return_path
from server.dashboard.routes import PageRoutes
from server.dashboard.sessions import SessionService, csrf_token, is_secret, new_secret
from server.database.columns import utc_now
from server.identity.access_rules import PUBLIC
from server.identity.logins.endpoints import PAGE as ACTIVATE
from server.identity.logins.service import LoginService
from server.identity.oauth import OAuthError, RequestCodes, format_user_code, read_user_code
from server.identity.tokens import token_digest
from server.web.state import AppState, State, address_of, place_of
from shared.errors import Forbidden, Unauthorized

LOGIN_SECONDS = 3600  # that a login page may wait to be filled in
MAX_TOKEN = 200  # characters of a token, or of a device code
WAITING = f"{LOGIN}/code"
CODE_COOKIE = "mobizo_login_code"  # the device code, a dot, and the user code
CLIENT_ID, CLIENT_NAME = "dashboard", "dashboard in a browser"
TOKEN_DAYS = 1  # of a token that only a session uses; a session is shorter
REFRESH_SECONDS = 3  # of the page that waits; it only reads, so it may ask more often than a program polls
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
        code_path=WAITING,
    )
    _set_cookie(request, response, LOGIN_COOKIE, secret, LOGIN_SECONDS)
    return response


def _set_cookie(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    response.set_cookie(
        name, value, max_age=seconds, path="/", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


def _signed_in(request: Request, target: str, secret: str, expires: datetime) -> Response:
    response = redirect(target)
    _set_cookie(request, response, COOKIE, secret, int((expires - utc_now()).total_seconds()))
    response.delete_cookie(LOGIN_COOKIE, path="/")
    response.delete_cookie(CODE_COOKIE, path="/")
    return response


@router.get(LOGIN, dependencies=[PUBLIC])
async def login_page(request: Request, next: Next = "/") -> Response:
    """The page on which a person signs in with a token, or asks for a code."""
    return _login_page(request, return_path(next))


@router.post(LOGIN, dependencies=[PUBLIC], openapi_extra=FORM_BODY)
async def login(request: Request, state: State) -> Response:
    """Begins a session, and shows the page that the person wanted."""
    fields = await read_form(request)
    target = return_path(fields.get("next", "/"))
    secret = request.cookies.get(LOGIN_COOKIE, "")
    if not is_secret(secret):
        return _login_page(request, target, TOO_LATE, 403)
    check_csrf(secret, fields)
    token = fields.get("token", "").strip()[:MAX_TOKEN]
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
    return _signed_in(request, target, session, expires)


def _begin(state: AppState, token: str) -> tuple[str, datetime]:
    with state.database.writing() as session:
        return SessionService(session).begin(token)


@router.post(WAITING, dependencies=[PUBLIC], openapi_extra=FORM_BODY)
async def ask_for_code(request: Request, state: State) -> Response:
    """Begins a login by a code, unless the browser has one that waits, and shows the page that waits for it."""
    fields = await read_form(request)
    target = return_path(fields.get("next", "/"))
    secret = request.cookies.get(LOGIN_COOKIE, "")
    if not is_secret(secret):
        return _login_page(request, target, TOO_LATE, 403)
    check_csrf(secret, fields)
    response = redirect(f"{WAITING}?next={quote(target, safe='/')}")
    cookie_codes = _codes(request)
    if cookie_codes is None or not await run_in_threadpool(_waits, state, cookie_codes[0]):
        try:
            codes = await state.write_queue.run(_ask, state, place_of(address_of(request)))
        except OAuthError as error:
            return _login_page(request, target, _sentence(error), error.http_status)
        _set_cookie(request, response, CODE_COOKIE, f"{codes.device_code}.{codes.user_code}", codes.expires_in)
    return response


@router.get(WAITING, dependencies=[PUBLIC])
async def wait_for_code(request: Request, state: State, next: Next = "/") -> Response:
    """Shows the code until a person decides; then begins the session, or says on the login page why there is none."""
    target, codes = return_path(next), _codes(request)
    if codes is None:
        return redirect(f"{LOGIN}?next={quote(target, safe='/')}")
    device_code, user_code = codes
    if await run_in_threadpool(_waits, state, device_code):
        return page(
            request,
            None,
            "login_code.html",
            "Sign in with a code",
            user_code=user_code,
            activate=ACTIVATE,
            login=LOGIN,
            seconds=REFRESH_SECONDS,
        )
    if request.headers.get("hx-request") == "true":
        return Response(status_code=204, headers={"HX-Refresh": "true"})  # the whole page begins the session
    outcome = await state.write_queue.run(_redeem, state, device_code)
    if isinstance(outcome, OAuthError):
        response = _login_page(request, target, _sentence(outcome), 401)
        response.delete_cookie(CODE_COOKIE, path="/")
        return response
    return _signed_in(request, target, *outcome)


def _codes(request: Request) -> tuple[str, str] | None:
    """Returns the device code and the user code of the browser's cookie; None without a cookie of that form."""
    device_code, _, typed = request.cookies.get(CODE_COOKIE, "").partition(".")
    user_code = read_user_code(typed)
    return (
        None
        if user_code is None or not 0 < len(device_code) <= MAX_TOKEN
        else (device_code, format_user_code(user_code))
    )


def _sentence(error: OAuthError) -> str:
    return f"{error.detail[:1].upper()}{error.detail[1:]}."


def _ask(state: AppState, address: str) -> RequestCodes:
    with state.database.writing() as session:
        return LoginService(session).ask(CLIENT_ID, CLIENT_NAME, frozenset(), address)


def _waits(state: AppState, device_code: str) -> bool:
    with state.database.autocommit() as session:
        return LoginService(session).waits(CLIENT_ID, device_code)


def _redeem(state: AppState, device_code: str) -> tuple[str, datetime] | OAuthError:
    with state.database.writing() as session:
        login = LoginService(session).poll(CLIENT_ID, device_code, TOKEN_DAYS)
        return login if isinstance(login, OAuthError) else SessionService(session).begin(login.token)
