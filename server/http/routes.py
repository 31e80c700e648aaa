"""How every route reads bodies and answers: strict JSON in, tags and kept answers out, problems documented.

`Routes` is the router of every slice. Knows no slice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.dependencies.models import Dependant
from fastapi.params import Form
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from starlette.requests import ClientDisconnect

from server.auth.guard import Holder, OneTime, refuse_stranger
from server.http.etags import add_tag, has_tag
from server.http.idempotency import AnsweredBefore, keep_once
from server.http.json_bodies import UnsupportedMediaType, check_json_type, parse_json
from server.http.openapi import documented, operation_id, raised_by
from server.http.problems import TooSlow
from server.http.retries import with_retries
from shared.errors import (
    BadRequest,
    InvalidRequest,
    MobizoError,
    NotFound,
    TooLarge,
    Unavailable,
)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRequest(Request):
    """A request whose JSON was read already."""

    value: Any = None

    async def json(self) -> Any:
        """What the body tells."""
        return self.value


def _calls(dependant: Dependant) -> Iterator[Any]:
    for child in dependant.dependencies:
        yield child.call
        yield from _calls(child)


class Route(APIRoute):
    """One route."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        calls = list(_calls(self.dependant))
        first = [child.call for child in self.dependant.dependencies]
        if keep_once in calls and first[-1] is not keep_once:
            # An answer is given again only to whom the dependencies before let through.
            raise TypeError(f"{path}: `once` must be the endpoint's last parameter")
        if keep_once in calls and not any(isinstance(call, Holder | OneTime) for call in calls):
            raise TypeError(f"{path}: what anyone may do has no token that its answers could be kept for")
        self.needs_token = any(isinstance(call, SecurityBase) for call in calls)
        self.takes_json = self.body_field is not None and not isinstance(self.body_field.field_info, Form)
        self.responses = documented(self.responses, self._errors(calls))

    def _errors(self, calls: list[Any]) -> list[type[MobizoError]]:
        """What any route of this kind may answer."""
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
        """What answers a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except AnsweredBefore as before:
                return before.response
            keeper = getattr(request.state, "keeper", None)
            if keeper is not None:
                await run_in_threadpool(keeper.keep, response)
            return response

        async def answer_once(plain: Request) -> Response:
            request = await self._read(plain)
            response = await with_retries(request, answer)
            return add_tag(request, response) if has_tag(self.path, request.method, response) else response

        return answer_once

    async def _read(self, request: Request) -> Request:
        """The request with its JSON, if it is of a route that takes JSON. Raises what is wrong with it."""
        if not self.takes_json:
            return request
        if self.needs_token:
            refuse_stranger(request)
        read = JsonRequest(request.scope, request.receive)
        try:
            body = await read.body()
        except ClientDisconnect as error:
            raise BadRequest("the body broke off; send it again") from error
        if body:
            check_json_type(read.headers)
            read.value = parse_json(body)
        return read


class Routes(APIRouter):
    """The routes of one slice."""

    def __init__(self, **options: Any) -> None:
        super().__init__(route_class=Route, generate_unique_id_function=operation_id, **options)
