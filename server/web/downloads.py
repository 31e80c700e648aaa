"""Stored files as responses: entity tags, ranges, and how the bytes reach the client.

`file_response` answers as RFC 9110 says: strong ETag, If-None-Match, Range and If-Range. Starlette's FileResponse
answers malformed or unknown range units with 400 and errors as plain text, and ignores If-None-Match.

Another process sends the bytes where the settings say so (`handed_over`): nginx, asked by X-Accel-Redirect (`accel`),
or the bucket, at a signed address (`redirect`). Otherwise this process sends them in pieces. The pieces of a whole file
are hashed on the way, and a file whose hash is wrong is never sent to its end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse

from server.settings import MEBIBYTE, Delivery
from server.storage.bucket import BucketArtifacts
from server.storage.directory import DiskArtifacts
from server.storage.store import ArtifactStore, Damaged
from server.web.middleware import RangeNotSatisfiable
from server.web.openapi import FILE, FILE_PARAMETERS, raises
from server.web.state import AppState

FILE_ROUTE: dict[str, Any] = {
    "response_class": Response,
    "responses": FILE | raises(RangeNotSatisfiable, Damaged),
    "openapi_extra": FILE_PARAMETERS,
}
_ONE_RANGE = re.compile(r"bytes=\s*(\d{0,18})-(\d{0,18})\s*", re.IGNORECASE)
UNDERSTANDS = ("x-sendfile-type", "X-Accel-Redirect")  # the header that deploy/nginx.conf adds to each request
ACCEL_PREFIX = "/mobizo-files/"  # the location in deploy/nginx.conf
REDIRECT_BYTES = 8 * MEBIBYTE  # smaller files are streamed also by `redirect`
REDIRECT_SECONDS = 300  # for which a signed address works
MEDIA_TYPE = "application/octet-stream"


def client_has(headers: Headers, etag: str) -> bool:
    """Returns whether If-None-Match names a representation; its comparison is weak."""
    listed = ",".join(headers.getlist("if-none-match")).split(",")
    client_tags = [tag.strip().removeprefix("W/") for tag in listed]
    return etag in client_tags or client_tags == ["*"]


def requested_range(headers: Headers, etag: str, size: int) -> tuple[int, int] | None:
    """Returns (start, end), end exclusive, or None for the whole file.

    The whole file is also sent for several ranges, other units, malformed ranges and an If-Range that names another
    file, as RFC 9110 allows or demands. Raises RangeNotSatisfiable.
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
    """Returns the response to a GET or HEAD. Raises RangeNotSatisfiable, or NotFound if the store lacks the file.

    more: headers of every response, redirects included; they replace default headers of the same name.
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
    if client_has(request.headers, etag):
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
    return StreamingResponse(artifacts.stream(sha256, start, end), status, headers, MEDIA_TYPE)


def handed_over(
    request: Request,
    artifacts: ArtifactStore,
    sha256: str,
    size: int,
    *,
    whole: bool,
    headers: dict[str, str],
    more: Mapping[str, str],
) -> Response | None:
    """Returns a response that lets nginx or the bucket send the file; None if this process must send it.

    whole: whether all `size` bytes are to be sent, whatever range was requested. headers: of a response from this
    server; more: those of them that a redirect has, too.
    """
    state: AppState = request.app.state.mobizo
    settings = state.settings
    if settings.delivery is Delivery.ACCEL and isinstance(artifacts, DiskArtifacts):
        if request.headers.get(UNDERSTANDS[0]) != UNDERSTANDS[1]:
            return None
        state.meters.handed_over.labels(settings.delivery).inc(size)
        location = {"X-Accel-Redirect": ACCEL_PREFIX + artifacts.name(sha256)}
        return Response(headers=headers | location, media_type=MEDIA_TYPE)
    if settings.delivery is Delivery.REDIRECT and isinstance(artifacts, BucketArtifacts):
        # A bucket honours Range but does not know our ETag: it would send a range that If-Range forbids.
        if size < REDIRECT_BYTES or (whole and "range" in request.headers):
            return None
        state.meters.handed_over.labels(settings.delivery).inc(size)
        url = artifacts.signed_url(sha256, REDIRECT_SECONDS)
        return Response(status_code=307, headers={**more, "Location": url, "Cache-Control": "private, no-store"})
    return None
