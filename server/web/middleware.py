"""ASGI middleware around every request, without buffering, so that streams pass through.

`Meter`, the outermost, records latency and bytes in the process's `Meters`. `Envelope` adds request ids, log lines, the
deadline of bodies, the pace of refusals, and a response to unexpected errors. Every error becomes an RFC 9457 problem
document. The size of a body is limited by its route.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.process_collector import ProcessCollector
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.web.openapi import PROBLEM_JSON, methods_at
from shared.errors import (
    BadRequest,
    InvalidRequest,
    MobizoError,
    NotFound,
    TooLarge,
    TooManyRequests,
    TooSlow,
    Unauthorized,
    Unavailable,
)
from shared.invalid_fields import invalid_fields

Instruments = TypeVar("Instruments")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE = "none"
UNANSWERED = 499  # the client disconnected, or the server was stopped
REQUEST_ID = "X-Request-Id"
_ID_NAME = REQUEST_ID.lower().encode()
_OURS = (_ID_NAME, b"x-content-type-options")
BODY_SECONDS = 30.0  # that a client may be behind the pace of SLOWEST
SLOWEST = 4096  # bytes of a body per second
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
MAX_ERRORS = 20  # validation errors that are reported
MAX_FIELD, MAX_MESSAGE = 200, 1_000  # characters of each
_log = structlog.get_logger()


class MethodNotAllowed(MobizoError, status=405):
    """This address does not take that method; /docs lists those that it does."""


class RangeNotSatisfiable(MobizoError, status=416):
    """The requested range lies beyond the file's end."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"the file has {size} bytes")


class AmbiguousLength(BadRequest, code=BadRequest.code):
    """The request has Content-Length and Transfer-Encoding, which proxies and servers read differently; send one."""


_BY_STATUS: dict[int, type[MobizoError]] = {404: NotFound, 405: MethodNotAllowed, 413: TooLarge}


def problem_response(error: MobizoError, request: Request) -> Response:
    """Returns the problem document of `error` as a response. Logs an error of the server."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        cause = str(error.__cause__).partition("\n")[0] if error.__cause__ is not None else None
        _log.error("request-failed", code=error.code, detail=error.detail, cause=cause)
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, AmbiguousLength):
        headers["Connection"] = "close"  # where the next request begins is not certain
    if isinstance(error, RangeNotSatisfiable):
        headers["Content-Range"] = f"bytes */{error.size}"
    if isinstance(error, Unavailable):
        headers["Retry-After"] = "5"
    if isinstance(error, TooManyRequests):
        seconds = math.ceil(error.extra.get("retry_after_seconds", 1))
        headers["Retry-After"] = str(seconds)
        headers["RateLimit"] = f'"{error.extra.get("limit", "default")}";r=0;t={seconds}'
    # ASCII, since a detail may quote text that UTF-8 cannot carry (lone surrogates).
    body = json.dumps(error.problem(instance=request.url.path)).encode("ascii")
    return Response(body, error.status, headers, PROBLEM_JSON)


def from_validation(error: RequestValidationError) -> InvalidRequest:
    """Returns the problem of a request that is not of the described form. Reports at most MAX_ERRORS errors."""
    found = invalid_fields(error)
    count = len(found)
    errors = [
        {
            "field": ".".join(str(part) for part in item.location if part != "body")[:MAX_FIELD] or "body",
            "message": item.message[:MAX_MESSAGE],
        }
        for item in found[:MAX_ERRORS]
    ]
    first = f"{errors[0]['field']}: {errors[0]['message']}" if errors else "the request is not of the described form"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return InvalidRequest(f"{first}{more}", errors=errors)


def _from_http(error: HTTPException) -> MobizoError:
    error_class = _BY_STATUS.get(error.status_code)
    if error_class is not None:
        return error_class(
            None if error_class is not NotFound else "there is nothing at this address; /docs lists what there is"
        )
    generic = BadRequest(str(error.detail))
    generic.extra["status"] = error.status_code
    generic.extra["title"] = HTTPStatus(error.status_code).phrase
    return generic


def add_problem_handlers(app: FastAPI) -> None:
    """Makes `app` answer what no route answers with a problem document."""

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        response = problem_response(_from_http(error), request)
        response.status_code = error.status_code
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED and (
            methods := methods_at(request.app.openapi(), request.url.path)
        ):
            # Starlette knows only the methods of the first route at the address.
            response.headers["Allow"] = ", ".join(methods)
        return response


class Meters:
    """One process's instruments."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        build = Gauge("mobizo_build_info", "What runs here; always 1", ("version", "python"), registry=self.registry)
        build.labels(version("mobizo"), ".".join(str(part) for part in sys.version_info[:3])).set(1)
        self.requests = Histogram(
            "mobizo_http_request_seconds",
            "From a request's head to its answer's, by route template and status class",
            ("method", "route", "status"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self.received = Counter(
            "mobizo_http_received_bytes", "Bytes of requests' bodies", ("route",), registry=self.registry
        )
        self.sent = Counter("mobizo_http_sent_bytes", "Bytes of answers' bodies", ("route",), registry=self.registry)
        self.handed_over = Counter(
            "mobizo_files_handed_over_bytes",
            "Bytes of the files that nginx (accel) or the bucket (redirect) was left to send; a part counts as whole",
            ("by",),
            registry=self.registry,
        )
        for by in ("accel", "redirect"):
            self.handed_over.labels(by)
        self.running = Gauge("mobizo_http_requests_running", "Requests being answered", registry=self.registry)
        self.streams = Gauge("mobizo_event_streams_open", "Event streams being followed", registry=self.registry)
        self._parts: dict[object, Any] = {}
        self._lock = threading.Lock()

    def part(self, make: Callable[[CollectorRegistry], Instruments]) -> Instruments:
        """Returns the instruments of a feature; `make` makes them once, in this registry."""
        with self._lock:
            if make not in self._parts:
                self._parts[make] = make(self.registry)
            part: Instruments = self._parts[make]
            return part


class Meter:
    """ASGI middleware, the outermost one, that records latency and bytes. Streams pass through unbuffered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        meters: Meters = scope["app"].state.mobizo.meters
        began = time.perf_counter()
        answered, received = False, 0

        def route() -> str:
            # The router stores the matched route in the scope.
            return getattr(scope.get("route"), "path", NO_ROUTE)

        def count(status: int) -> None:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            meters.requests.labels(method, route(), f"{status // 100}xx").observe(time.perf_counter() - began)
            if received:
                meters.received.labels(route()).inc(received)

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal answered
            # Recorded before sending, so that a client that has received the response finds it counted.
            if message["type"] == "http.response.start":
                answered = True
                count(message["status"])
            if size := len(message.get("body", b"")):
                meters.sent.labels(route()).inc(size)
            await send(message)

        with meters.running.track_inprogress():
            try:
                await self._app(scope, receive_counted, send_counted)
            finally:
                if not answered:
                    count(UNANSWERED)


def _finish(message: Message, method: str, request_id: str) -> None:
    """Adds the headers that every response has."""
    headers = [(name, value) for name, value in message.get("headers", ()) if name not in _OURS]
    headers += [(_ID_NAME, request_id.encode()), (b"x-content-type-options", b"nosniff")]
    reads = method in ("GET", "HEAD") and message["status"] < HTTPStatus.BAD_REQUEST
    # The response to a POST may contain a token. What a GET returns is private, and its ETag says if it is current.
    if all(name != b"cache-control" for name, _ in headers):
        headers.append((b"cache-control", b"private, no-cache" if reads else b"no-store"))
    message["headers"] = headers


def _check_head(scope: Scope, headers: Headers) -> None:
    """Raises BadRequest for an address that no route has, AmbiguousLength for a body with two lengths."""
    if "content-length" in headers and "transfer-encoding" in headers:
        raise AmbiguousLength
    if _CONTROL.search(scope["path"]) or b"%00" in scope["query_string"]:
        raise BadRequest("the address has a control character")


def credentials_of(scope: Scope) -> str:
    """Returns what a caller sends to be let in, or else its address."""
    headers = Headers(scope=scope)
    return headers.get("authorization") or headers.get("cookie") or str((scope["client"] or ("",))[0])


class PacedBody:
    """A request's body, whose client may be at most `seconds` behind the pace of SLOWEST at any time.

    What arrived before gives no further time, and the time in which the server does not read does not count.
    """

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive, self._whole = receive, False
        self._most = self._left = seconds

    async def receive(self) -> Message:
        """Returns the next piece. Raises TooSlow."""
        if self._whole:
            return await self._receive()
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._left):
                message = await self._receive()
        except TimeoutError as error:
            raise TooSlow from error
        earned = len(message.get("body", b"")) / SLOWEST
        self._left = min(self._most, max(0.0, self._left + began - time.monotonic()) + earned)
        self._whole = not message.get("more_body", False)
        return message


def current_request_id() -> str:
    """Returns the id of the request that is being handled, as in its log lines and X-Request-Id."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


class Envelope:
    """ASGI middleware within `Meter`: headers and errors of every response, and its log line."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._seconds = BODY_SECONDS
        self._log = _log.bind()  # once, and not for each request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        header = headers.get(REQUEST_ID, "")
        request_id = header if _GOOD_ID.fullmatch(header) else uuid.uuid4().hex
        status = 0
        began = time.monotonic()

        async def send_finished(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if status == HTTPStatus.TOO_MANY_REQUESTS:
                    await asyncio.sleep(scope["app"].state.mobizo.limits.refusal_delay(credentials_of(scope)))
                _finish(message, scope["method"], request_id)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                _check_head(scope, headers)
                await self._app(scope, PacedBody(receive, self._seconds).receive, send_finished)
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
                self._log.info(
                    "request",
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    seconds=round(time.monotonic() - began, 4),
                )
