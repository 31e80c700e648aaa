"""Refusals in the form that huggingface_hub turns into its own errors: a status, X-Error-Code and X-Error-Message.

The body stays a problem document. A client without a token, or one that asks for another tenant's repository, gets
RepoNotFound.
"""

from __future__ import annotations

from http import HTTPStatus

from fastapi import Request, Response

from server.web.routes import Route
from shared.errors import (
    AdapterNotFound,
    FileNotInAdapter,
    Forbidden,
    MobizoError,
    RevisionNotFound,
    TenantSuspended,
    Unauthorized,
)


class NotReleased(Forbidden, title="No approved version"):
    """No version of this adapter is approved, so it has no `main`; approve one, or name a version."""


MAX_CHARACTERS = 500
CODE, MESSAGE = "X-Error-Code", "X-Error-Message"
# Clients compare these two texts. The first one distinguishes a bad token from a missing repository.
BAD_TOKEN = "Invalid credentials in Authorization header"  # noqa: S105
DISABLED = "Access to this resource is disabled."


_CODES: dict[type[MobizoError], str] = {
    AdapterNotFound: "RepoNotFound",
    RevisionNotFound: "RevisionNotFound",
    FileNotInAdapter: "EntryNotFound",
    NotReleased: "GatedRepo",  # tells clients that the repository exists and that a person must act
}
_MESSAGES: dict[type[MobizoError], str] = {Unauthorized: BAD_TOKEN, TenantSuspended: DISABLED}


def plain(text: str) -> str:
    """Returns text for a header: one short line of ASCII."""
    return " ".join(text.encode("ascii", "backslashreplace").decode().split())[:MAX_CHARACTERS]


def refusal_headers(error: MobizoError, *, token: bool) -> dict[str, str]:
    """Returns the headers by which clients recognize an error. token: whether the request had a token."""
    if isinstance(error, Unauthorized) and not token:
        return {CODE: "RepoNotFound", MESSAGE: plain(error.detail)}
    headers = {MESSAGE: _MESSAGES.get(type(error)) or plain(error.detail)}
    if code := _CODES.get(type(error)):
        headers[CODE] = code
    if isinstance(error, FileNotInAdapter) and "revision" in error.extra:
        headers["X-Repo-Commit"] = error.extra["revision"]  # clients cache that this revision lacks the file
    return headers


class HubRoute(Route):
    """A route whose errors have the Hub's headers."""

    def refused(self, request: Request, error: MobizoError) -> Response:
        """Returns a problem document; its headers say what the client did wrong."""
        response = super().refused(request, error)
        if error.status < HTTPStatus.INTERNAL_SERVER_ERROR:
            response.headers.update(refusal_headers(error, token="authorization" in request.headers))
        return response
