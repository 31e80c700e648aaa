"""Entity tags of JSON answers: If-None-Match on what is read, If-Match on what is changed (RFC 9110).

A tag is made of the very bytes of the representation, so it is strong, and two servers give the same.
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
    """The strong entity tag of a representation."""
    return f'"{sha256_hex(content)[:TAG_DIGITS]}"'


def _listed(values: list[str]) -> list[str]:
    return [entry.strip() for value in values for entry in value.split(",")]


def has_tag(path: str, method: str, response: Response) -> bool:
    """Whether an answer is the representation of something that may change."""
    is_json = response.status_code == HTTPStatus.OK and response.headers.get("content-type") == "application/json"
    return is_json and method in TAGGED_METHODS and path.startswith(TAGGED_PATHS)


def add_tag(request: Request, response: Response) -> Response:
    """`response` with its tag, or 304 if the client has it already: If-None-Match compares weakly."""
    found = tag(bytes(response.body))
    response.headers["ETag"] = found
    known = _listed(request.headers.getlist("if-none-match"))
    if known != ["*"] and found not in [entry.removeprefix("W/") for entry in known]:
        return response
    kept = {name: value for name, value in response.headers.items() if name in ("etag", "cache-control", "vary")}
    return Response(status_code=304, headers=kept)


@dataclass(frozen=True)
class Precondition:
    """What a request expects of the thing that it changes."""

    tags: tuple[str, ...] | None

    def check(self, view: BaseModel) -> None:
        """`view`: the thing as a GET would show it now. Raises PreconditionFailed; If-Match compares strongly."""
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
    """What If-Match says."""
    return Precondition(None if if_match is None else tuple(_listed(request.headers.getlist("if-match"))))


IfMatch = Annotated[Precondition, Depends(precondition)]
