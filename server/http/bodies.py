"""Reading a file that a request brings, which may not be large. Knows no route."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from server.http.json_bodies import UnsupportedMediaType, media_type
from shared.errors import BadRequest, TooLarge

_BINARY = ("", "application/octet-stream")


def check_binary_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body that says it is something else than bytes."""
    kind, _ = media_type(headers)
    if kind not in _BINARY:
        raise UnsupportedMediaType(f"send the bytes with Content-Type: application/octet-stream, not {kind[:100]}")


async def read_limited(request: Request, limit: int, note: Callable[[bytes], None] = lambda piece: None) -> bytes:
    """The whole body, at most `limit` bytes of it ever in memory. note: given each piece as it arrives.

    Raises TooLarge as soon as it is longer or says that it will be, BadRequest if it breaks off.
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
