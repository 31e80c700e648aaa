"""Reads a file from a request's body, up to a limit that the endpoint names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from server.web.json_bodies import UnsupportedMediaType, media_type
from shared.errors import BadRequest, TooLarge

BINARY = "application/octet-stream"
# OpenAPI's description of a body of bytes.
BYTES: dict[str, Any] = {
    "requestBody": {"required": True, "content": {BINARY: {"schema": {"type": "string", "format": "binary"}}}}
}


def check_binary_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body of another content type than bytes."""
    kind, _ = media_type(headers)
    if kind not in ("", BINARY):
        raise UnsupportedMediaType(f"send the bytes with Content-Type: application/octet-stream, not {kind[:100]}")


async def read_limited(request: Request, limit: int, note: Callable[[bytes], None] = lambda piece: None) -> bytes:
    """Returns the whole body. At most `limit` bytes of it are in memory. note: called with each piece as it arrives.

    Raises TooLarge as soon as the body or its announced length exceeds the limit, BadRequest if it breaks off.
    """
    too_large = TooLarge(f"the body is over {limit} bytes, the most that can be valid here")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    data = bytearray()
    try:
        async for piece in request.stream():
            if len(data) + len(piece) > limit:
                raise too_large
            note(piece)
            data += piece
    except ClientDisconnect as error:
        raise BadRequest("the body broke off; send it again") from error
    return bytes(data)
