"""Entity tags of JSON responses: If-None-Match for reads, If-Match for changes (RFC 9110).

A tag is a digest of the representation's bytes, so it is strong and equal on all servers.
"""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends, Header, Request, Response
from pydantic import BaseModel

from server.web.openapi import TAGGED_METHODS, TAGGED_PATHS, may_raise
from shared.canonical import sha256_hex
from shared.errors import MobizoError

TAG_DIGITS = 32  # 128 bits


class PreconditionFailed(MobizoError):
    """The thing has changed since you read it (If-Match names another version); read it again and decide anew."""

    status, code, title = 412, "precondition-failed", "Precondition failed"


def tag(content: bytes) -> str:
    """Returns the strong entity tag of a representation."""
    return f'"{sha256_hex(content)[:TAG_DIGITS]}"'


def _listed(values: list[str]) -> list[str]:
    return [entry.strip() for value in values for entry in value.split(",")]


def has_tag(path: str, method: str, response: Response) -> bool:
    """Returns whether a response has an entity tag: it represents a resource that may change."""
    is_json = response.status_code == HTTPStatus.OK and response.headers.get("content-type") == "application/json"
    return is_json and method in TAGGED_METHODS and path.startswith(TAGGED_PATHS)


def add_tag(request: Request, response: Response) -> Response:
    """Returns `response` with its tag, or 304 if the client has it already: If-None-Match compares weakly."""
    etag = tag(bytes(response.body))
    response.headers["ETag"] = etag
    known = _listed(request.headers.getlist("if-none-match"))
    if known != ["*"] and etag not in [entry.removeprefix("W/") for entry in known]:
        return response
    kept = {name: value for name, value in response.headers.items() if name in ("etag", "cache-control", "vary")}
    return Response(status_code=304, headers=kept)


@dataclass(frozen=True)
class Precondition:
    """The state that a request expects of the resource that it changes."""

    tags: tuple[str, ...] | None

    def check(self, view: BaseModel) -> None:
        """Raises PreconditionFailed if the tag differs (strong comparison). view: the resource as GET shows it."""
        if self.tags is not None and self.tags != ("*",) and tag(view.model_dump_json().encode()) not in self.tags:
            raise PreconditionFailed


@may_raise(PreconditionFailed)
def precondition(
    request: Request,
    if_match: Annotated[
        str | None,
        Header(alias="If-Match", description="the ETag that it had when you read it: if it has another by now, 412"),
    ] = None,
) -> Precondition:
    """Returns the precondition in If-Match."""
    return Precondition(None if if_match is None else tuple(_listed(request.headers.getlist("if-match"))))


IfMatch = Annotated[Precondition, Depends(precondition)]
