"""JSON as requests may bring it: I-JSON (RFC 7493), so that no two readers can understand it differently.

UTF-8 without exception, each name once in its object, finite numbers, no lone surrogates; and no NUL, which PostgreSQL
cannot store. Knows no route.
"""

from __future__ import annotations

import json
import math
from email.message import Message
from typing import Any

from starlette.datastructures import Headers

from shared.errors import BadRequest, MobizoError

_NOT_TEXT = ("\0", "\\u0000", "\\ud", "\\uD")


class UnsupportedMediaType(MobizoError):
    """This route takes another kind of body; send the Content-Type that /docs names, without Content-Encoding."""

    status, code, title = 415, "unsupported-media-type", "Unsupported media type"


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest(f"the body has a number that is too large ({text[:30]})")
    return value


def _no_constant(text: str) -> float:
    raise BadRequest(f"the body has {text}, which JSON does not have; leave it out or send null")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"the body has an object with the name {twice[:100]!r} twice")
    return found


def _check_text(value: Any) -> None:
    """Raises BadRequest for a string somewhere in `value` that is no text."""
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
    """The value that `data` tells. Raises BadRequest saying what is wrong."""
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise BadRequest("the body has a number of too many digits") from error
    # Only a text with one of these can be at fault, and few are: the others need no second look.
    if any(sign in text for sign in _NOT_TEXT):
        _check_text(value)
    return value


def media_type(headers: Headers) -> tuple[str, str]:
    """(type, charset) of a body, lower case; empty where unsaid. Raises UnsupportedMediaType if it is compressed."""
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("compressed bodies are not taken; send it without Content-Encoding")
    content_type = headers.get("content-type")
    if content_type is None:
        return "", ""
    message = Message()
    message["content-type"] = content_type
    return message.get_content_type(), str(message.get_param("charset", "")).lower()


def check_json_type(headers: Headers) -> None:
    """Raises UnsupportedMediaType for a body that does not say that it is JSON in UTF-8."""
    kind, charset = media_type(headers)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType(f"send JSON with Content-Type: application/json, not {kind[:100] or 'without one'}")
    if charset not in ("", "utf-8", "utf8"):
        raise UnsupportedMediaType(f"send JSON in UTF-8, not {charset[:100]}")
