"""The router of every feature: checks the caller, limits and reads the body, retries, and compares entity tags.

A request passes in this order: the route's rule (token and rate limit), the body's limit, strict JSON, the tenant's
turn at the threads, the endpoint. An endpoint that is a coroutine takes turns itself where it uses threads. A request
whose transaction collides with another is executed again from the beginning, here and nowhere else.

The entity tag of a JSON response is a digest of its bytes, so it is strong and equal on all servers (RFC 9110).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, nullcontext
from enum import StrEnum
from http import HTTPStatus
from inspect import iscoroutinefunction
from itertools import count
from typing import Any, ClassVar

import structlog
from fastapi import APIRouter, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.types import Message

from server.database.database import TRIES, Collision, pause_seconds
from server.settings import MEBIBYTE, Settings
from server.web.bodies import UnsupportedMediaType, check_json_type, parse_json
from server.web.body_budgets import Take, make_body_memory, sender_of
from server.web.downloads import client_has
from server.web.idempotency import AlreadyAnswered, keep_once
from server.web.middleware import from_validation, problem_response
from server.web.openapi import TAGGED_METHODS, TAGGED_PATHS, documented, operation_id, raised_by
from server.web.state import AppState
from server.web.tenant_turns import MAX_REQUESTS, Places, current_tenant
from shared.canonical import sha256_hex
from shared.errors import BadRequest, InvalidRequest, MobizoError, NotFound, TooLarge, TooSlow, Unavailable

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
MAX_BODY_BYTES = 4 * MEBIBYTE  # limit of a JSON request
NO_BODY_BYTES = 1024  # limit of a route without a body
UNCHECKED_BODY_BYTES = 64 << 10  # limit of a route that reads a body from callers without a valid token
PARSED_AT_ONCE_BYTES = 16 << 10  # a larger JSON body is parsed in a thread, so that other requests go on
MAX_ERRORS_OF_LARGE = 10_000  # validation errors of a body that is parsed in a thread; collecting them takes long
HANDLERS = Places("handling", 8, MAX_REQUESTS)  # requests of one process that are handled in threads
# Event streams that are opened, or read their events: a tenant that opens many leaves the threads to others.
STREAM_READERS = Places("streams", 2, MAX_REQUESTS)
PARSERS = Places("parsing", 3)  # threads, two of them for one tenant
STACK = "fastapi_function_astack"
_log = structlog.get_logger()
TAG_DIGITS = 32  # 128 bits


def tag(content: bytes) -> str:
    """Returns the strong entity tag of a representation."""
    return f'"{sha256_hex(content)[:TAG_DIGITS]}"'


def has_tag(path: str, method: str, response: Response) -> bool:
    """Returns whether a response has an entity tag: it represents a resource that may change."""
    is_json = response.status_code == HTTPStatus.OK and response.headers.get("content-type") == "application/json"
    return is_json and method in TAGGED_METHODS and path.startswith(TAGGED_PATHS)


def add_tag(request: Request, response: Response) -> Response:
    """Returns `response` with its tag, or 304 if the client has it already: If-None-Match compares weakly."""
    etag = tag(bytes(response.body))
    response.headers["ETag"] = etag
    if not client_has(request.headers, etag):
        return response
    headers = {name: value for name, value in response.headers.items() if name in ("etag", "cache-control", "vary")}
    return Response(status_code=304, headers=headers)


class BodyKind(StrEnum):
    """The kind of body that a route reads."""

    NONE = "none"
    JSON = "JSON"
    FORM = "form"
    FILE = "file"


class JsonRequest(Request):
    """A request whose JSON was read already."""

    value: Any = None

    async def json(self) -> Any:
        """Returns the body's value."""
        return self.value


class Rule:
    """The requirements of a route on its caller. Every dependency that admits callers is one."""

    needs_token: ClassVar[bool] = False  # whether the caller must send a bearer token
    checks_token: ClassVar[bool] = False  # whether `admit` finds out that the token is valid

    async def admit(self, request: Request) -> None:
        """Checks the caller before any of the body is read. Raises what the caller is refused with."""
        raise NotImplementedError


def _calls(dependant: Dependant) -> Iterator[Any]:
    for child in dependant.dependencies:
        yield child.call
        yield from _calls(child)


class Route(APIRoute):
    """One route."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        calls = list(_calls(self.dependant))
        self.rule = next((call for call in calls if isinstance(call, Rule)), None)
        first = [child.call for child in self.dependant.dependencies]
        if keep_once in calls and first[-1] is not keep_once:
            # A stored response is repeated only to callers that the dependencies before it let in.
            raise TypeError(f"{path}: `once` must be the endpoint's last parameter")
        if keep_once in calls and not any(isinstance(call, Rule) and call.needs_token for call in calls):
            raise TypeError(f"{path}: what anyone may do has no token that its answers could be kept for")
        self._in_thread = not iscoroutinefunction(endpoint)
        self._places = STREAM_READERS if self.response_class is EventSourceResponse else HANDLERS
        self._body_type = TypeAdapter[Any](self.body_field.field_info.annotation or Any) if self.body_field else None
        self.responses = documented(self.responses, self._errors(calls))

    def _errors(self, calls: list[Any]) -> list[type[MobizoError]]:
        """Returns the errors that this route may answer with."""
        errors: list[type[MobizoError]] = [MobizoError, Unavailable, BadRequest]
        for call in calls:
            errors += raised_by(call)
        if self.param_convertors:
            errors.append(NotFound)
        parts = [self.dependant, *self.dependant.dependencies]
        if self.body_field is not None or any(part.path_params + part.query_params for part in parts):
            errors.append(InvalidRequest)
        if self.methods != {"GET"}:
            errors += [TooLarge]
        if self.body_field is not None:
            errors += [TooSlow, UnsupportedMediaType]
        return errors

    def get_route_handler(self) -> Handler:
        """Returns the function that answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except AlreadyAnswered as before:
                return before.response
            recorder = getattr(request.state, "response_recorder", None)
            if recorder is not None:
                recorder.keep(response)
            return response

        async def admit_and_answer(plain: Request) -> Response:
            state: AppState = plain.app.state.mobizo
            if self.rule is not None:
                await self.rule.admit(plain)
            tenant, sender = sender_of(plain)
            current_tenant.set(tenant)
            with state.get(make_body_memory).share(tenant, sender) as take:
                request = await self._read(plain, take)
                async with state.get(self._places.make).turn(tenant) if self._in_thread else nullcontext():
                    response = await with_retries(request, answer)
                return add_tag(request, response) if has_tag(self.path, request.method, response) else response

        async def answer_or_refuse(request: Request) -> Response:
            try:
                return await admit_and_answer(request)
            except RequestValidationError as wrong:
                return self.refused(request, from_validation(wrong))
            except MobizoError as error:
                return self.refused(request, error)

        return answer_or_refuse

    def refused(self, request: Request, error: MobizoError) -> Response:
        """Returns the response to a request that is refused with an error: a problem document."""
        return problem_response(error, request)

    @property
    def body_kind(self) -> BodyKind:
        """The kind of body that the route reads."""
        if self.body_field is not None:
            return BodyKind.JSON
        return BodyKind.FILE if "requestBody" in (self.openapi_extra or {}) else BodyKind.NONE

    def body_limit(self, settings: Settings) -> int:
        """Returns the most bytes that a request's body may have. An endpoint may accept less."""
        if self.body_kind is BodyKind.NONE:
            return NO_BODY_BYTES
        if self.body_kind is BodyKind.FILE:
            return settings.upload_bytes
        if self.rule is not None and not self.rule.checks_token:
            return min(UNCHECKED_BODY_BYTES, MAX_BODY_BYTES)
        return MAX_BODY_BYTES

    async def _read(self, plain: Request, take: Take) -> Request:
        """Returns the request with its body, and its JSON if the route takes JSON.

        A file stays to be read, and reading it raises TooLarge at the limit. take: called with the bytes that come into
        memory. Raises TooLarge or what is wrong with the JSON.
        """
        state: AppState = plain.app.state.mobizo
        limit = self.body_limit(state.settings)
        too_large = TooLarge(f"the body has more than {limit} bytes, the limit of this route")
        length = plain.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limit:
            raise too_large
        received_bytes, staged = 0, self.body_kind is BodyKind.FILE
        # The announced bytes are taken before any is read, so that a refused request holds none while it is held back.
        taken_bytes = 0 if staged or not length.isdigit() else int(length)
        take(taken_bytes)

        async def receive() -> Message:
            nonlocal received_bytes, taken_bytes
            message = await plain.receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > limit:
                raise too_large
            if not staged and received_bytes > taken_bytes:
                take(received_bytes - taken_bytes)
                taken_bytes = received_bytes
            return message

        if self.body_kind in (BodyKind.NONE, BodyKind.FILE):
            return Request(plain.scope, receive)
        read = JsonRequest(plain.scope, receive)
        try:
            body = await read.body()
        except ClientDisconnect as error:
            raise BadRequest("the body broke off; send it again") from error
        except MobizoError as error:
            raise error.with_traceback(None) from None  # its frames hold what was read
        if body and self.body_kind is BodyKind.JSON:
            check_json_type(read.headers)
            if len(body) <= PARSED_AT_ONCE_BYTES:
                read.value = parse_json(body)
            else:
                read.value = await state.get(PARSERS.make).run(sender_of(plain)[0], self._parse_large, body)
        return read

    def _parse_large(self, body: bytes) -> Any:
        """Returns a body's value. Raises InvalidRequest for so many errors that reporting them would take long."""
        value = parse_json(body)
        try:
            if self._body_type is not None:
                self._body_type.validate_python(value)
        except ValidationError as error:
            if error.error_count() > MAX_ERRORS_OF_LARGE:
                raise InvalidRequest(
                    f"the body has {error.error_count()} errors, such as names that /docs does not describe", errors=[]
                ) from None
        return value


class Routes(APIRouter):
    """The routes of one feature. kind: their class."""

    def __init__(self, kind: type[Route] = Route, **options: Any) -> None:
        super().__init__(route_class=kind, generate_unique_id_function=operation_id, **options)


async def with_retries(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
    """Returns the response to a request whose body was read. Raises Collision if every attempt collided with another.

    A PUT is tried once: its body is a stream, which is gone by then.
    """
    most = 1 if request.method == "PUT" else TRIES
    outer = request.scope.get(STACK)
    try:
        for tries in count(1):
            try:
                async with AsyncExitStack() as stack:
                    request.scope[STACK] = stack
                    return await answer(request)
            except Collision as error:
                if tries >= most:
                    raise
                _log.info("collision", tries=tries, cause=str(error.__cause__).partition("\n")[0])
            await asyncio.sleep(pause_seconds(tries))
        raise AssertionError("unreachable")
    finally:
        request.scope[STACK] = outer
