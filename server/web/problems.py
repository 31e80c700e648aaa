"""Turns every error into an RFC 9457 problem document."""

from __future__ import annotations

import json
import math
from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from server.web.openapi import PROBLEM_JSON, methods_at
from shared.errors import (
    BadRequest,
    InvalidRequest,
    MobizoError,
    NotFound,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)

MOST_ERRORS = 20  # validation errors that are reported
MOST_FIELD, MOST_MESSAGE = 200, 1_000  # characters of each
_log = structlog.get_logger()


class MethodNotAllowed(MobizoError):
    """This address does not take that method; /docs lists those that it does."""

    status, code, title = 405, "method-not-allowed", "Method not allowed"


class RangeNotSatisfiable(MobizoError):
    """The requested range lies beyond the file's end."""

    status, code, title = 416, "range-not-satisfiable", "Range not satisfiable"

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"the file has {size} bytes")


class TooSlow(MobizoError):
    """The body took too long to arrive; send it again, over a better connection."""

    status, code, title = 408, "too-slow", "Request timeout"


_BY_STATUS: dict[int, type[MobizoError]] = {404: NotFound, 405: MethodNotAllowed, 413: TooLarge}


def problem_response(error: MobizoError, request: Request) -> Response:
    """Returns the problem document of `error` as a response. Logs an error of the server."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        cause = str(error.__cause__).partition("\n")[0] if error.__cause__ is not None else None
        _log.error("request-failed", code=error.code, detail=error.detail, cause=cause)
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
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
    """Returns the problem of a request that is not of the described form. Reports at most MOST_ERRORS errors."""
    count = len(error.errors())
    errors = [
        {
            "field": ".".join(str(part) for part in item["loc"] if part != "body")[:MOST_FIELD] or "body",
            "message": item["msg"][:MOST_MESSAGE],
        }
        for item in error.errors()[:MOST_ERRORS]
    ]
    first = f"{errors[0]['field']}: {errors[0]['message']}" if errors else "the request is not of the described form"
    more = f" (and {count - 1} more)" if count > 1 else ""
    return InvalidRequest(f"{first}{more}", errors=errors)


def _from_http(error: HTTPException) -> MobizoError:
    known = _BY_STATUS.get(error.status_code)
    if known is not None:
        return known(None if known is not NotFound else "there is nothing at this address; /docs lists what there is")
    generic = BadRequest(str(error.detail))
    generic.extra["status"] = error.status_code
    generic.extra["title"] = HTTPStatus(error.status_code).phrase
    return generic


def add_problem_handlers(app: FastAPI) -> None:
    """Makes `app` answer every error with a problem document, without internals of unexpected errors."""

    @app.exception_handler(MobizoError)
    def mobizo(request: Request, error: MobizoError) -> Response:
        return problem_response(error, request)

    @app.exception_handler(RequestValidationError)
    def validation(request: Request, error: RequestValidationError) -> Response:
        return problem_response(from_validation(error), request)

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
