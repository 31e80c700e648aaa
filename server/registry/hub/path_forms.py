"""The form in which clients name the paths that they ask about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated
from urllib.parse import parse_qsl

from fastapi import Depends, Request

from server.web.bodies import read_limited
from server.web.middleware import TooSlow
from server.web.openapi import may_raise
from shared.errors import BadRequest, TooLarge

MOST_BYTES = 262_144
MOST_PATHS = 1000
FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "application/x-www-form-urlencoded": {
                "schema": {
                    "type": "object",
                    "required": ["paths"],
                    "properties": {
                        "paths": {"type": "array", "items": {"type": "string"}},
                        "expand": {"type": "boolean"},
                    },
                }
            }
        },
    }
}


@dataclass(frozen=True)
class RequestedPaths:
    """The paths that a form names."""

    paths: tuple[str, ...]
    expand: bool  # tell the version that each came with, too


@may_raise(TooLarge, TooSlow)
async def read_paths(request: Request) -> RequestedPaths:
    """Parses the body, whatever its content type says. Raises BadRequest or TooLarge."""
    raw = await read_limited(request, MOST_BYTES)
    try:
        fields = parse_qsl(raw.decode(), keep_blank_values=True, max_num_fields=MOST_PATHS + 1, errors="strict")
    except ValueError as error:
        raise BadRequest(f"send a form with at most {MOST_PATHS} `paths`, and `expand`") from error
    return RequestedPaths(
        paths=tuple(value for field, value in fields if field == "paths"),
        expand=any(field == "expand" and value.lower() in ("true", "1") for field, value in fields),
    )


PathsForm = Annotated[RequestedPaths, Depends(read_paths)]
