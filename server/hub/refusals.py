"""Refusals in the form that huggingface_hub turns into its own errors: a status, X-Error-Code and X-Error-Message.

The body stays a problem document. Who has no token, or asks for another tenant's repository, is told that there is
none: RepoNotFound. Knows no repository.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Request, Response

from server.http.openapi import operation_id
from server.http.problems import problem_response
from server.http.routes import Route
from server.hub.errors import NotReleased
from shared.errors import (
    AdapterNotFound,
    FileNotInAdapter,
    MobizoError,
    RevisionNotFound,
    TenantSuspended,
    Unauthorized,
)

MOST_CHARACTERS = 500
CODE, MESSAGE = "X-Error-Code", "X-Error-Message"
# Clients know these two by heart. The first keeps them from taking a bad token for a repository that is not there.
BAD_TOKEN = "Invalid credentials in Authorization header"  # noqa: S105
DISABLED = "Access to this resource is disabled."


_CODES: dict[type[MobizoError], str] = {
    AdapterNotFound: "RepoNotFound",
    RevisionNotFound: "RevisionNotFound",
    FileNotInAdapter: "EntryNotFound",
    NotReleased: "GatedRepo",  # clients then know that the repository is there, and that people must act
}
_MESSAGES: dict[type[MobizoError], str] = {Unauthorized: BAD_TOKEN, TenantSuspended: DISABLED}


def plain(text: str) -> str:
    """Text as a header may carry it: one line of ASCII, and not too long for clients to read."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())[:MOST_CHARACTERS]


def refusal_headers(error: MobizoError, *, token: bool) -> dict[str, str]:
    """What clients go by. token: whether the request bore one, good or bad."""
    if isinstance(error, Unauthorized) and not token:
        return {CODE: "RepoNotFound", MESSAGE: plain(error.detail)}
    headers = {MESSAGE: _MESSAGES.get(type(error)) or plain(error.detail)}
    if code := _CODES.get(type(error)):
        headers[CODE] = code
    if isinstance(error, FileNotInAdapter) and "revision" in error.extra:
        headers["X-Repo-Commit"] = error.extra["revision"]  # clients remember that this revision lacks the file
    return headers


class HubRoute(Route):
    """One route, refusing in the Hub's way."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except MobizoError as error:
                if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                    raise
                response = problem_response(error, request)
                response.headers.update(refusal_headers(error, token="authorization" in request.headers))
                return response

        return answer


class HubRoutes(APIRouter):
    """Routes of that kind."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=HubRoute, generate_unique_id_function=operation_id, **options)
