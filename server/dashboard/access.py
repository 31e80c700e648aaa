"""The rule of every page: a session whose token has the scopes that the REST routes of the same data require.

visitor: Annotated[Visitor, signed_in(Scope.JOBS_READ)]    the first parameter of a page
form: Fields                                               the second of a page that is posted to
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from server.dashboard.pages import Visitor
from server.dashboard.sessions import SessionService, is_csrf_token, is_secret, session_digest
from server.database.columns import utc_now
from server.identity.tokens import Principal, make_last_used
from server.web.bodies import UnsupportedMediaType, media_type
from server.web.openapi import may_raise
from server.web.routes import Rule
from server.web.state import AppState, address_of
from shared.access import Scope
from shared.errors import BadRequest, Forbidden, TenantSuspended, TooManyRequests, Unauthorized

COOKIE = "mobizo_session"
LOGIN_COOKIE = "mobizo_login"  # guards the login form, before there is a session
CSRF = "csrf"  # the field of a form
FORM = "application/x-www-form-urlencoded"
MAX_FIELDS = 100


class ForgedForm(Forbidden, title="Form not accepted"):
    """The form was not sent by a page of this session; reload the page and send it again."""


def _lookup(state: AppState, secret: str) -> tuple[Principal, str]:
    with state.database.autocommit() as session:
        return SessionService(session).principal(secret)


@may_raise(Unauthorized, Forbidden, TenantSuspended, TooManyRequests)
@dataclass(frozen=True)
class SignedIn(Rule):
    """Admits a session whose token is valid and has all of `scopes`. Its requests count as the token's."""

    scopes: frozenset[Scope]
    checks_token: ClassVar[bool] = True

    async def __call__(self, request: Request) -> Visitor:
        """Returns the visitor whom `admit` looked up."""
        visitor: Visitor = request.state.visitor
        return visitor

    async def admit(self, request: Request) -> None:
        """Looks the session up. Raises Unauthorized, TenantSuspended, Forbidden or TooManyRequests."""
        state: AppState = request.app.state.mobizo
        secret, address = request.cookies.get(COOKIE, ""), address_of(request)
        if not is_secret(secret):
            state.limits.anonymous(address)
            raise Unauthorized("sign in first")
        digest = session_digest(secret)
        with state.limits.checking(digest, address):
            principal, token = await run_in_threadpool(_lookup, state, secret)
        state.limits.before(token, address)
        state.limits.good(token)
        state.get(make_last_used).note(principal.token_number, utc_now())
        request.state.visitor = Visitor(principal, secret, request)
        if missing := self.scopes - principal.scopes:
            raise Forbidden(f"the token lacks: {', '.join(sorted(missing))}", missing=sorted(missing))


def signed_in(*scopes: Scope) -> Any:
    """Returns the rule for sessions whose token has all `scopes`."""
    return Depends(SignedIn(frozenset(scopes)))


async def read_form(request: Request) -> Mapping[str, str]:
    """Returns the fields of a form; of a field that is given twice, the last value.

    Raises UnsupportedMediaType, BadRequest or TooLarge.
    """
    kind, _ = media_type(request.headers)
    if kind != FORM:
        raise UnsupportedMediaType(f"send the form as {FORM}")
    body = await request.body()  # the router limits its size
    try:
        fields = dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict"))
    except ValueError as error:
        raise BadRequest("the form cannot be read") from error
    if any("\0" in value for value in fields.values()):
        raise BadRequest("the form contains a NUL character")
    return fields


def check_csrf(secret: str, fields: Mapping[str, str]) -> None:
    """Raises ForgedForm unless a page that was made with this secret sent the form."""
    if not is_csrf_token(secret, fields.get(CSRF, "")):
        raise ForgedForm


@may_raise(ForgedForm, UnsupportedMediaType, BadRequest)
async def _posted(request: Request) -> Mapping[str, str]:
    fields = await read_form(request)
    visitor: Visitor = request.state.visitor
    check_csrf(visitor.secret, fields)
    return fields


Fields = Annotated[Mapping[str, str], Depends(_posted)]
