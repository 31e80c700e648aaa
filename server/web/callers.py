"""What the router needs of the rules that say who may call a route; `server.identity.access_rules` has the rules."""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from fastapi import Request

from server.web.state import AppState
from shared.errors import Unauthorized


class RateLimit(StrEnum):
    """What the requests of a route are counted by; `server.web.limits` counts."""

    CREDENTIAL = "token"
    ADDRESS = "address"
    REFUSALS = "refusals"  # requests with a wrong token, by address
    NONE = "none"


class Rule:
    """What a route requires of its caller. Every dependency that lets callers in is one."""

    needs_token: ClassVar[bool] = False  # whether the caller must send a bearer token
    checks_token: ClassVar[bool] = False  # whether `admit` finds out that the token is valid

    @property
    def callers(self) -> str:
        """Who may call, in words."""
        raise NotImplementedError

    @property
    def rate_limit(self) -> RateLimit:
        """What limits how often."""
        raise NotImplementedError

    async def admit(self, request: Request) -> None:
        """Checks the caller before any of the body is read. Raises what the caller is refused with."""
        raise NotImplementedError


def address_of(request: Request) -> str:
    """Returns the caller's address."""
    return request.client.host if request.client else ""


def refuse_anonymous(state: AppState, request: Request) -> Unauthorized:
    """Counts a request without a token, and returns the error to raise. Raises TooManyRequests if there were many."""
    state.limits.anonymous(address_of(request))
    return Unauthorized()
