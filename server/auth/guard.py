"""Who makes a request, and whether their role may: FastAPI dependencies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from server.auth.models import Role
from server.auth.service import Principal, TokenService
from server.http.place import Here
from shared.errors import Forbidden, Unauthorized

_scheme = HTTPBearer(auto_error=False, description="a token issued by `mobizo-server`, or by enrolment")


def _bearer(credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_scheme)]) -> str:
    if credentials is None or not credentials.credentials:
        raise Unauthorized
    return credentials.credentials


Bearer = Annotated[str, Depends(_bearer)]


def _principal(here: Here, bearer: Bearer) -> Principal:
    with here.database.reading() as session:
        return TokenService(session).principal(bearer)


def _allow(*roles: Role) -> Callable[[Principal], Principal]:
    def allowed(principal: Annotated[Principal, Depends(_principal)]) -> Principal:
        if principal.role not in roles:
            raise Forbidden(f"a {principal.role} token may not do that; it takes one of: {', '.join(roles)}")
        return principal

    return allowed


Operator = Annotated[Principal, Depends(_allow(Role.OPERATOR))]
App = Annotated[Principal, Depends(_allow(Role.APP, Role.OPERATOR))]
Device = Annotated[Principal, Depends(_allow(Role.DEVICE))]
Anyone = Annotated[Principal, Depends(_allow(Role.DEVICE, Role.APP, Role.OPERATOR))]
