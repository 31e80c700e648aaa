"""A stored file as a response: strong ETag, If-None-Match, Range and If-Range (RFC 9110).

Starlette's FileResponse answers malformed or foreign range units with 400 and errors as plain text, and knows no
If-None-Match; hence this.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import Headers

from server.storage.store import ArtifactStore, Damaged
from server.web.delivery import handed_over
from server.web.openapi import FILE, FILE_PARAMETERS, raises
from server.web.problems import RangeNotSatisfiable
from server.web.sending import MEDIA_TYPE, FileSpan

FILE_ROUTE: dict[str, Any] = {
    "response_class": Response,
    "responses": FILE | raises(RangeNotSatisfiable, Damaged),
    "openapi_extra": FILE_PARAMETERS,
}
_ONE_RANGE = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*", re.IGNORECASE)


def _unchanged(headers: Headers, etag: str) -> bool:
    """Whether If-None-Match names what we have; its comparison is weak."""
    known = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
    return etag in known or known == ["*"]


def requested_range(headers: Headers, etag: str, size: int) -> tuple[int, int] | None:
    """(start, end), end exclusive, or None for the whole file.

    Whole also for several ranges, other units, malformed ranges and an If-Range that names another file, as RFC 9110
    allows or demands. Raises RangeNotSatisfiable.
    """
    match = _ONE_RANGE.fullmatch(headers.get("range", ""))
    if match is None or headers.get("if-range", etag) != etag:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:
        start, end = max(size - int(last), 0), size
    else:
        start, end = int(first), min(int(last) + 1, size) if last else size
        if last and int(last) < start:
            return None
    if start >= size:
        raise RangeNotSatisfiable(size)
    return start, end


def file_response(
    request: Request, artifacts: ArtifactStore, sha256: str, filename: str, more: Mapping[str, str] | None = None
) -> Response:
    """A GET's or HEAD's answer. Raises RangeNotSatisfiable, or NotFound if the store lacks the file.

    more: headers of every answer, also of one that sends the client elsewhere; they replace those of the same name.
    """
    more = more or {}
    size = artifacts.size(sha256)
    etag = f'"{sha256}"'
    headers = {
        "ETag": etag,
        "Accept-Ranges": "bytes",
        # Content-addressed, so it never changes; private, because a token was needed.
        "Cache-Control": "private, max-age=31536000, immutable",
        "Content-Disposition": f'attachment; filename="{filename}"',
        "X-Content-Type-Options": "nosniff",
        **more,
    }
    if _unchanged(request.headers, etag):
        return Response(status_code=304, headers=headers)
    span = requested_range(request.headers, etag, size)
    if request.method != "HEAD":
        elsewhere = handed_over(request, artifacts, sha256, size, whole=span is None, headers=headers, more=more)
        if elsewhere is not None:
            return elsewhere
    start, end = span or (0, size)
    headers["Content-Length"] = str(end - start)
    if span is not None:
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    status = 200 if span is None else 206
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=MEDIA_TYPE)
    return FileSpan(artifacts, sha256, (start, end), status, headers)
