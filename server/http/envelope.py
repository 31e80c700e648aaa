"""Around every request: its id, its log line, the size and pace of its body, and the last net for unexpected errors.

Plain ASGI, so that streams pass through unbuffered. Knows no route; bodies of PUT are counted by who reads them.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from http import HTTPStatus

import structlog
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.problems import TooSlow, problem_response
from server.settings import Settings
from shared.errors import BadRequest, MobizoError, TooLarge

REQUEST_ID = "X-Request-Id"
SLOWEST = 4096  # bytes a second that a body must bring, once its first seconds are over
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_log = structlog.get_logger()


def _finish(message: Message, method: str, request_id: str) -> None:
    """Adds what every answer carries."""
    headers = MutableHeaders(scope=message)
    headers[REQUEST_ID] = request_id
    reads = method in ("GET", "HEAD") and message["status"] < HTTPStatus.BAD_REQUEST
    headers["X-Content-Type-Options"] = "nosniff"
    # An answer to a POST may show a token; what a GET shows is its caller's, and its ETag tells whether it still holds.
    headers.setdefault("Cache-Control", "private, no-cache" if reads else "no-store")


class _Body:
    """What a request brings, watched while it comes."""

    def __init__(self, receive: Receive, limit: int | None, seconds: float) -> None:
        self._receive, self._limit = receive, limit
        self._seen, self._whole = 0, False
        self._began, self._seconds = time.monotonic(), seconds

    async def receive(self) -> Message:
        """The next piece. Raises TooLarge or TooSlow."""
        if self._whole:
            return await self._receive()
        left = self._began + self._seconds + self._seen / SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0))
        except TimeoutError as error:
            raise TooSlow from error
        self._seen += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        if self._limit is not None and self._seen > self._limit:
            raise TooLarge(f"the body is over {self._limit} bytes, the most that is taken here")
        return message


class Envelope:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._limit = settings.max_body_bytes
        self._seconds = settings.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        status = 0
        began = time.monotonic()

        async def send_finished(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                _finish(message, scope["method"], request_id)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                self._check(scope, headers)
                limit = None if scope["method"] == "PUT" else self._limit
                await self._app(scope, _Body(receive, limit, self._seconds).receive, send_finished)
            except MobizoError as error:
                if status:
                    raise
                await problem_response(error, Request(scope))(scope, receive, send_finished)
            except Exception:
                _log.exception("request-crashed", method=scope["method"], path=scope["path"])
                if status:
                    raise
                await problem_response(MobizoError(), Request(scope))(scope, receive, send_finished)
            finally:
                _log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - began, 4),
                )

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises what is wrong with a request before any of its body is read."""
        if _CONTROL.search(scope["path"]) or b"%00" in scope["query_string"]:
            raise BadRequest("the address has a control character")
        length = headers.get("content-length", "0")
        if scope["method"] != "PUT" and length.isdigit() and int(length) > self._limit:
            raise TooLarge(f"the body has {length} bytes; at most {self._limit} are taken here")
