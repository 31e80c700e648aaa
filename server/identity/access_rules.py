"""The rule of every route: who may call it. FastAPI dependencies; a route has exactly one, as its first parameter.

    principal: Annotated[Principal, needs(Scope.JOBS_READ)]    a person or service whose token has the scope
    principal: Annotated[Principal, needs(Scope.JOBS_READ, or_device=True)]    or any device
    principal: Annotated[Principal, needs()]                   a person or service, whatever its scopes
    principal: Device                                          a device
    bearer: Enrolling                                          the bearer of a one-time token, which the route checks
    dependencies=[PUBLIC]                                      anyone; in the route's decorator
    dependencies=[PROBE]                                       anyone, as often as they like: for health checks

The router calls a rule's `admit` before it reads any of the request's body; the dependency then returns its result.
A rule is the first parameter, because FastAPI resolves parameters in their order and a transaction must not begin for a
caller without the right to it. tests/server/identity/test_matrix.py finds routes without a rule, and rules that come
late.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.clock import utc_now
from server.identity.activity import make_last_used
from server.identity.tokens import Principal, TokenService, token_digest
from server.web.limits import RateLimit, address_of
from server.web.openapi import may_raise
from server.web.routes import Rule
from server.web.state import AppState, State
from shared.access import Role, Scope
from shared.errors import Forbidden, TenantSuspended, TooManyRequests, Unauthorized

_scheme = HTTPBearer(auto_error=False, description="a token issued by `mobizo-server`, or by enrollment")
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)]  # for the API's description


def _lookup(state: AppState, bearer: str) -> Principal:
    with state.database.autocommit() as session:
        return TokenService(session).principal(bearer)


async def _bearer(request: Request, state: AppState) -> str:
    """Returns the token of a request. Raises Unauthorized if there is none, TooManyRequests."""
    credentials = await _scheme(request)
    if credentials is None or not credentials.credentials:
        state.limits.anonymous(address_of(request))
        raise Unauthorized
    return credentials.credentials


@may_raise(Unauthorized, Forbidden, TenantSuspended, TooManyRequests)
@dataclass(frozen=True)
class Holder(Rule):
    """Admits a live token: of a person or service with all of `scopes`, or of a device."""

    scopes: frozenset[Scope]
    people: bool
    devices: bool
    needs_token: ClassVar[bool] = True
    checks_token: ClassVar[bool] = True

    @property
    def rate_limit(self) -> RateLimit:
        """By token."""
        return RateLimit.CREDENTIAL

    @property
    def callers(self) -> str:
        """Who may call, in words."""
        if not self.people:
            return "device"
        scopes = " and ".join(f"`{scope}`" for scope in sorted(self.scopes)) or "person or service"
        return f"{scopes}, or device" if self.devices else scopes

    async def __call__(self, request: Request, credentials: _Credentials) -> Principal:
        """Returns the caller that `admit` looked up."""
        principal: Principal = request.state.principal
        return principal

    async def admit(self, request: Request) -> None:
        """Looks the token up. Raises Unauthorized, TenantSuspended, Forbidden or TooManyRequests."""
        state: AppState = request.app.state.mobizo
        text = await _bearer(request, state)
        digest, address = token_digest(text), address_of(request)
        state.limits.before(digest, address)
        try:
            principal = await run_in_threadpool(_lookup, state, text)
        except Unauthorized:
            state.limits.refused(digest, address)
            raise
        state.limits.good(digest)
        state.get(make_last_used).note(principal.token_number, utc_now())
        if principal.role is Role.DEVICE:
            if not self.devices:
                raise Forbidden("a device's token may not do that; it takes an operator's or an app's")
        elif not self.people:
            raise Forbidden(f"a token of role {principal.role} may not do that; it takes a device's")
        elif missing := self.scopes - principal.scopes:
            raise Forbidden(f"the token lacks: {', '.join(sorted(missing))}", missing=sorted(missing))
        request.state.principal = principal


@may_raise(Unauthorized, TooManyRequests)
@dataclass(frozen=True)
class OneTime(Rule):
    """Admits any token; the route uses it up or rejects it."""

    needs_token: ClassVar[bool] = True

    @property
    def rate_limit(self) -> RateLimit:
        """By address, for wrong tokens."""
        return RateLimit.REFUSALS

    @property
    def callers(self) -> str:
        """Who may call, in words."""
        return "bearer of a one-time token"

    async def __call__(self, request: Request, state: State, credentials: _Credentials) -> AsyncIterator[str]:
        """Returns the token's text. If the route rejects it, that counts against the caller's address."""
        text: str = request.state.bearer
        try:
            yield text
        except Unauthorized:
            state.limits.refused(token_digest(text), address_of(request))
            raise

    async def admit(self, request: Request) -> None:
        """Finds a token of any kind. Raises Unauthorized if there is none, TooManyRequests."""
        state: AppState = request.app.state.mobizo
        text = await _bearer(request, state)
        state.limits.before(token_digest(text), address_of(request))
        request.state.bearer = text


@may_raise(TooManyRequests)
@dataclass(frozen=True)
class Open(Rule):
    """Admits any caller, with or without a token."""

    limited: bool

    @property
    def callers(self) -> str:
        """Who may call, in words."""
        return "anyone"

    @property
    def rate_limit(self) -> RateLimit:
        """By address, or none."""
        return RateLimit.ADDRESS if self.limited else RateLimit.NONE

    async def __call__(self) -> None:
        """Does nothing: `admit` has counted the request."""

    async def admit(self, request: Request) -> None:
        """Counts the request. Raises TooManyRequests."""
        if self.limited:
            state: AppState = request.app.state.mobizo
            state.limits.anonymous(address_of(request))


def needs(*scopes: Scope, or_device: bool = False) -> Any:
    """Returns the rule for people and services whose token has all `scopes`; `or_device`: and for any device."""
    return Depends(Holder(frozenset(scopes), people=True, devices=or_device))


Device = Annotated[Principal, Depends(Holder(frozenset(), people=False, devices=True))]
Enrolling = Annotated[str, Depends(OneTime())]
PUBLIC = Depends(Open(limited=True))
PROBE = Depends(Open(limited=False))
