"""Around every request: its id, its log line, the limit of its body, and the last net for unexpected errors.

Plain ASGI, so that streams pass through unbuffered. Knows no route; bodies of PUT are counted by who reads them.
"""

from __future__ import annotations

import re
import time
import uuid

import structlog
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.problems import problem_response
from shared.errors import MobizoError, TooLarge

REQUEST_ID = "X-Request-Id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_log = structlog.get_logger()


class Envelope:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

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

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._serve(scope, headers, receive, send_with_id)
            except Exception:
                _log.exception("request-crashed", method=scope["method"], path=scope["path"])
                if status:
                    raise
                await problem_response(MobizoError(), Request(scope))(scope, receive, send_with_id)
            finally:
                _log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - began, 4),
                )

    async def _serve(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        if scope["method"] == "PUT":
            await self._app(scope, receive, send)
            return
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._limit:
            error = TooLarge(f"the body has {length} bytes; at most {self._limit} are taken here")
            await problem_response(error, Request(scope))(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._limit:
                # The one kind of error that FastAPI passes on while it reads a body.
                raise HTTPException(413)
            return message

        await self._app(scope, receive_counted, send)
