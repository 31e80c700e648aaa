"""Stored files as responses: entity tags, ranges, and how the bytes reach the client.

`file_response` answers as RFC 9110 says: strong ETag, If-None-Match, Range and If-Range. Starlette's FileResponse
answers malformed or unknown range units with 400 and errors as plain text, and ignores If-None-Match.

Another process sends the bytes where the settings say so (`handed_over`): nginx, asked by X-Accel-Redirect (`accel`),
or the bucket, at a signed address (`redirect`). Otherwise this process sends them (`FileSpan`). A whole file is sent in
pieces, which are hashed on the way, until its hash was found right since it last changed.

Files whose hash is known are sent with the system's `sendfile`, so that their bytes do not pass through this process.
ASGI has an extension for it, `http.response.zerocopysend`, which uvicorn lacks. `ZeroCopy` adds it for uvicorn's h11
protocol on asyncio's own event loop, without TLS. Elsewhere files are sent in pieces. Without the extension, a download
of 50 MB takes 5.5 times nginx's time instead of 3.6.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

import h11
from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from server.settings import Delivery
from server.storage.bucket import BucketArtifacts
from server.storage.directory import DiskArtifacts
from server.storage.store import ArtifactStore, Damaged
from server.web import connections
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
REDIRECT_SECONDS = 300  # for which a signed address works
SMALL_BYTES = 64 << 10  # smaller spans are read and sent without `sendfile`
SPAN_BYTES = 1 << 20  # sent at once, before other requests have their turn
MEDIA_TYPE = "application/octet-stream"
SLOWEST = 4096  # bytes per second that a client must read, beside STALLED_SECONDS
EXTENSION = "http.response.zerocopysend"


def _unchanged(headers: Headers, etag: str) -> bool:
    """Returns whether If-None-Match names the stored file; its comparison is weak."""
    client_tags = [tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")]
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
        state.meters.handed_over(settings.delivery, size)
        location = {"X-Accel-Redirect": settings.accel_prefix + artifacts.name(sha256)}
        return Response(headers=headers | location, media_type="application/octet-stream")
    if settings.delivery is Delivery.REDIRECT and isinstance(artifacts, BucketArtifacts):
        # A bucket honours Range but does not know our ETag: it would send a range that If-Range forbids.
        if size < settings.redirect_bytes or (whole and "range" in request.headers):
            return None
        state.meters.handed_over(settings.delivery, size)
        url = artifacts.signed_url(sha256, REDIRECT_SECONDS)
        return Response(status_code=307, headers={**more, "Location": url, "Cache-Control": "private, no-store"})
    return None


class FileSpan(Response):
    """Bytes `start` to `end` (exclusive) of a stored file; `headers` include Content-Length."""

    media_type = MEDIA_TYPE

    def __init__(
        self, artifacts: ArtifactStore, sha256: str, span: tuple[int, int], status: int, headers: dict[str, str]
    ) -> None:
        super().__init__(status_code=status, headers=headers)
        self._artifacts, self._sha256, self._span = artifacts, sha256, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the bytes."""
        start, end = self._span
        file = None
        if EXTENSION in scope.get("extensions", {}):
            file = self._artifacts.opened(self._sha256, start, end)
        if file is None:
            pieces = self._artifacts.stream(self._sha256, start, end)
            answer = StreamingResponse(pieces, self.status_code, media_type=MEDIA_TYPE)
            answer.raw_headers = self.raw_headers
            await answer(scope, receive, send)
            return
        with file:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            if end - start <= SMALL_BYTES:
                await _warm(file, start, end - start)
                await send({"type": "http.response.body", "body": os.pread(file.fileno(), end - start, start)})
                return
            try:
                for offset in range(start, end, SPAN_BYTES):
                    count = min(SPAN_BYTES, end - offset)
                    await _warm(file, offset, count)
                    span = {"file": file, "offset": offset, "count": count, "more_body": offset + count < end}
                    await send({"type": EXTENSION, **span})
            except ConnectionError:
                return  # the client has gone away


async def _warm(file: BinaryIO, offset: int, count: int) -> None:
    """Reads a span into the page cache, because `sendfile` would block the event loop on a disk read.

    Checks both ends only. What is missing between them is read while it is sent.
    """
    for place in (offset, offset + count - 1):
        try:
            cached_bytes = os.preadv(file.fileno(), [bytearray(1)], place, os.RWF_NOWAIT)
        except OSError:
            cached_bytes = 0
        if not cached_bytes:
            await asyncio.to_thread(os.pread, file.fileno(), count, offset)
            return


class _Span:
    """Stands for bytes that h11 counts without holding them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class ZeroCopy:
    """ASGI middleware; the outermost one, because it writes to uvicorn's connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, with the extension where it is possible."""
        cycle = getattr(send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle) or not _can(cycle.transport):
            await self._app(scope, receive, send)
            return

        async def send_all(message: Message) -> None:
            if message["type"] == EXTENSION:
                await _send_file(cycle, message)
                if not message["more_body"]:
                    await send({"type": "http.response.body", "body": b""})
            else:
                await send(message)

        extensions = {**scope.get("extensions", {}), EXTENSION: {}}
        await self._app({**scope, "extensions": extensions}, receive, send_all)


def _can(transport: asyncio.Transport) -> bool:
    plain = transport.get_extra_info("sslcontext") is None
    return plain and isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


async def _send_file(cycle: RequestResponseCycle, message: Message) -> None:
    """Sends `count` bytes of `file` from `offset` on, as part of a response that has begun.

    Raises ConnectionError if the client has gone away or reads too slowly, EOFError if the file is shorter.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected or cycle.transport.is_closing():
        raise ConnectionResetError("the client has gone away")
    span = cast(Any, _Span(message["count"]))
    loop = asyncio.get_running_loop()
    for part in cycle.conn.send_with_data_passthrough(h11.Data(data=span)) or ():
        if cast(Any, part) is span:
            sending = loop.sendfile(cycle.transport, message["file"], message["offset"], message["count"])
            try:
                # On a file system without sendfile, asyncio reads and writes instead.
                sent_bytes = await asyncio.wait_for(sending, connections.STALLED_SECONDS + message["count"] / SLOWEST)
            except TimeoutError as error:
                cycle.transport.abort()
                raise ConnectionResetError("the client does not read") from error
            except RuntimeError as error:
                # The connection may close after the check above, before asyncio begins, which then raises this.
                if not cycle.transport.is_closing():
                    raise
                raise ConnectionResetError("the client has gone away") from error
            if sent_bytes != message["count"]:
                # The announced length cannot be sent any more; the client must notice.
                cycle.transport.abort()
                raise EOFError(f"a file ended after {sent_bytes} of {message['count']} bytes")
        else:
            cycle.transport.write(part)
