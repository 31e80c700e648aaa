"""The rule of every route: who may call it. FastAPI dependencies; a route has exactly one, as its first parameter.

    principal: Annotated[Principal, needs(Scope.JOBS_READ)]    a person or service whose token has the scope
    principal: Annotated[Principal, needs(Scope.JOBS_READ, or_device=True)]    or any device
    principal: Annotated[Principal, needs()]                   a person or service, whatever its scopes
    principal: Device                                          a device
    bearer: Enrolling                                          the bearer of a one-time token, which the route checks
    dependencies=[PUBLIC]                                      anyone; in the route's decorator
    dependencies=[PROBE]                                       anyone, as often as they like: for health checks

First, because a route's transaction must not begin for somebody who may not make it: FastAPI resolves parameters in
their order. tests/server/auth/test_matrix.py finds routes without a rule, and rules that come late.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.auth.models import Role, Scope
from server.auth.service import Principal, TokenService
from server.clock import utc_now
from server.http.openapi import may_raise
from server.http.place import Here, Place
from server.identity import token_digest
from shared.errors import Forbidden, TenantSuspended, TooManyRequests, Unauthorized

_scheme = HTTPBearer(auto_error=False, description="a token issued by `mobizo-server`, or by enrolment")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)]


class Rule:
    """What a route asks of its caller; every dependency that lets callers in is one."""


def _lookup(place: Place, bearer: str) -> Principal:
    with place.database.glancing() as session:
        return TokenService(session).principal(bearer)


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _text(request: Request, here: Place, credentials: HTTPAuthorizationCredentials | None) -> str:
    if credentials is None or not credentials.credentials:
        here.limits.anonymous(_address(request))
        raise Unauthorized
    return credentials.credentials


def refuse_stranger(request: Request) -> None:
    """Before the body of a request that needs a token is read. Raises Unauthorized or TooManyRequests if none came."""
    if "authorization" not in request.headers:
        _text(request, request.app.state.place, None)


@may_raise(Unauthorized, Forbidden, TenantSuspended, TooManyRequests)
@dataclass(frozen=True)
class Holder(Rule):
    """A live token: of a person or service with all of `scopes`, or of a device."""

    scopes: frozenset[Scope]
    people: bool
    devices: bool

    async def __call__(self, request: Request, here: Here, credentials: _Credentials) -> Principal:
        """Who calls. Raises Unauthorized, TenantSuspended, Forbidden or TooManyRequests."""
        text = _text(request, here, credentials)
        digest, address = token_digest(text), _address(request)
        here.limits.before(digest, address)
        try:
            principal = await run_in_threadpool(_lookup, here, text)
        except Unauthorized:
            here.limits.refused(digest, address)
            raise
        here.limits.good(digest)
        here.uses.note(principal.token_number, utc_now())
        if principal.role is Role.DEVICE:
            if not self.devices:
                raise Forbidden("a device's token may not do that; it takes an operator's or an app's")
        elif not self.people:
            raise Forbidden(f"a token of role {principal.role} may not do that; it takes a device's")
        elif missing := self.scopes - principal.scopes:
            raise Forbidden(f"the token lacks: {', '.join(sorted(missing))}", missing=sorted(missing))
        return principal


@may_raise(Unauthorized, TooManyRequests)
@dataclass(frozen=True)
class OneTime(Rule):
    """Some token; the route uses it up or refuses it."""

    async def __call__(self, request: Request, here: Here, credentials: _Credentials) -> AsyncIterator[str]:
        """The token's text. Raises Unauthorized if there is none, TooManyRequests."""
        text = _text(request, here, credentials)
        digest, address = token_digest(text), _address(request)
        here.limits.before(digest, address)
        try:
            yield text
        except Unauthorized:
            here.limits.refused(digest, address)
            raise


@may_raise(TooManyRequests)
@dataclass(frozen=True)
class Open(Rule):
    """Anyone, with or without a token."""

    limited: bool

    async def __call__(self, request: Request, here: Here) -> None:
        """Lets the caller in. Raises TooManyRequests."""
        if self.limited:
            here.limits.anonymous(_address(request))


def needs(*scopes: Scope, or_device: bool = False) -> Any:
    """The rule of a route for people and services whose token has all `scopes`; `or_device`: and for any device."""
    return Depends(Holder(frozenset(scopes), people=True, devices=or_device))


Device = Annotated[Principal, Depends(Holder(frozenset(), people=False, devices=True))]
Enrolling = Annotated[str, Depends(OneTime())]
PUBLIC = Depends(Open(limited=True))
PROBE = Depends(Open(limited=False))
