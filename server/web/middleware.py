"""The outermost middleware: request ids, log lines, the deadline of bodies, and a response to unexpected errors.

It is plain ASGI, so that streams pass through unbuffered. The size of a body is limited by its route.
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

from server.settings import Settings
from server.web.problems import TooSlow, problem_response
from shared.errors import BadRequest, MobizoError

REQUEST_ID = "X-Request-Id"
SLOWEST = 4096  # bytes a second that a body must bring, once its first seconds are over
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_log = structlog.get_logger()


def _finish(message: Message, method: str, request_id: str) -> None:
    """Adds the headers that every response has."""
    headers = MutableHeaders(scope=message)
    headers[REQUEST_ID] = request_id
    reads = method in ("GET", "HEAD") and message["status"] < HTTPStatus.BAD_REQUEST
    headers["X-Content-Type-Options"] = "nosniff"
    # The response to a POST may contain a token. What a GET returns is private, and its ETag says if it is current.
    headers.setdefault("Cache-Control", "private, no-cache" if reads else "no-store")


def _check_address(scope: Scope) -> None:
    """Raises BadRequest for an address that no route has."""
    if _CONTROL.search(scope["path"]) or b"%00" in scope["query_string"]:
        raise BadRequest("the address has a control character")


class _Body:
    """A request's body, which must arrive in time."""

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seen, self._whole = 0, False
        self._began, self._seconds = time.monotonic(), seconds

    async def receive(self) -> Message:
        """Returns the next piece. Raises TooSlow."""
        if self._whole:
            return await self._receive()
        left = self._began + self._seconds + self._seen / SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), max(left, 0))
        except TimeoutError as error:
            raise TooSlow from error
        self._seen += len(message.get("body", b""))
        self._whole = not message.get("more_body", False)
        return message


class Envelope:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._seconds = settings.body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
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
                _check_address(scope)
                await self._app(scope, _Body(receive, self._seconds).receive, send_finished)
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
