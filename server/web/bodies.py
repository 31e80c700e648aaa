"""Reads request bodies: JSON strictly, and files up to a limit that the endpoint names.

JSON is I-JSON (RFC 7493), so that no two readers can understand a body differently: UTF-8, with unique names within an
object, finite numbers and no lone surrogates. NUL is rejected too, because PostgreSQL cannot store it. Depth and number
of values are bounded, so that reading takes time and memory proportional to the body's size.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import AsyncIterator
from email.message import Message
from functools import lru_cache
from typing import Any

from fastapi import Request
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from server.web.openapi import BINARY, BYTES_CONTENT
from shared.errors import BadRequest, MobizoError, TooLarge

READ_BYTES = 64 << 10  # read at once; a connection holds no more of a body before its route reads it
MAX_DEPTH = 64  # objects and arrays within each other
MAX_NAMES = 50_000  # names of all objects of a body
MAX_VALUES = 250_000  # values of a body
_NOT_TEXT = ("\0", "\\u0000", "\\ud", "\\uD")
# One string, also one without its end. Possessive, so that matching never goes back over a long body.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BRACKET = re.compile(rb"[][{}]")
BYTES: dict[str, Any] = {"requestBody": {"required": True} | BYTES_CONTENT}  # OpenAPI's description


class UnsupportedMediaType(MobizoError, status=415):
    """This route takes another kind of body; send the Content-Type that /docs names, without Content-Encoding."""


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest(f"the body has a number that is too large ({text[:30]})")
    return value


def _no_constant(text: str) -> float:
    raise BadRequest(f"the body has {text}, which JSON does not have; leave it out or send null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                raise BadRequest(f"the body has an object with the name {name[:100]!r} twice")
            names.add(name)
    return fields


def _check_size(data: bytes) -> None:
    """Raises BadRequest for more values, names or levels than are accepted; builds none of them."""
    # A small body with few brackets is within all three.
    if len(data) < MAX_NAMES and data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    marks = _STRING.sub(b"", data)
    if marks.count(b":") > MAX_NAMES:
        raise BadRequest(f"the body has more than {MAX_NAMES} names; split the request")
    if sum(marks.count(mark) for mark in (b",", b"[", b"{")) > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} values; split the request")
    depth = 0
    for bracket in _BRACKET.finditer(marks):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_DEPTH:
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} levels deep")


def _check_text(value: Any) -> None:
    """Raises BadRequest if a string within `value` has a NUL character or half of a surrogate pair."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str) and ("\0" in item or any("\ud800" <= sign <= "\udfff" for sign in item)):
            raise BadRequest("the body has a string with a NUL character or half of a surrogate pair")


def parse_json(data: bytes) -> Any:
    """Returns the value of a JSON text. Raises BadRequest with the reason."""
    _check_size(data)
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise BadRequest("the body has a number of too many digits") from error
    # Few texts contain one of these; only they need the walk over all values.
    if any(sign in text for sign in _NOT_TEXT):
        _check_text(value)
    return value


def media_type(headers: Headers) -> tuple[str, str]:
    """Returns type and charset of a body in lower case, empty if absent.

    Raises UnsupportedMediaType for a compressed body.
    """
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not taken; send it without Content-Encoding")
    content_type = headers.get("content-type")
    return ("", "") if content_type is None else _parsed_type(content_type)


@lru_cache(maxsize=32)
def _parsed_type(content_type: str) -> tuple[str, str]:
    message = Message()
    message["content-type"] = content_type
    return message.get_content_type(), str(message.get_param("charset", "")).lower()


def check_json_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body whose content type is not JSON in UTF-8."""
    kind, charset = media_type(headers)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"send JSON with Content-Type: application/json, not {kind[:100] or 'without one'}")
    if charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMediaType(f"send JSON in UTF-8, not {charset[:100]}")


def check_binary_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body of another content type than bytes."""
    kind, _ = media_type(headers)
    if kind not in ("", BINARY):
        raise UnsupportedMediaType(f"send the bytes with Content-Type: application/octet-stream, not {kind[:100]}")


async def pieces_of(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yields the body in pieces as it arrives.

    Raises TooLarge as soon as the body or its announced length exceeds the limit, BadRequest if it breaks off.
    """
    too_large = TooLarge(f"the body is over {limit} bytes, the most that can be valid here")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > limit:
        raise too_large
    received = 0
    try:
        async for piece in request.stream():
            received += len(piece)
            if received > limit:
                raise too_large
            if piece:
                yield piece
    except ClientDisconnect as error:
        raise BadRequest("the body broke off; send it again") from error
