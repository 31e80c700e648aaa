"""Routes that are answered without the framework's layers, because devices call them thousands of times a minute.

FastAPI takes more than half of the processor time of a heartbeat: it looks through all routes, opens three exit stacks,
and solves the endpoint's dependencies anew for each request. A direct route solves them in an order that was found
once. It is declared as any other, described in the same document, and answers with the same bytes; `create_api` alone,
without the `Shortcut`, answers it in the ordinary way, against which tests compare it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from server.web.middleware import from_validation
from server.web.routes import JsonRequest, Route, Rule

_MISSING = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}


@dataclass(frozen=True)
class _Step:
    """The call of a dependency, or of the endpoint.

    values: names of its parameters, each with the place of the call whose result it takes.
    """

    call: Callable[..., Awaitable[Any]]
    request_name: str | None
    values: tuple[tuple[str, int], ...]

    async def run(self, request: Request, results: Sequence[Any], **others: Any) -> Any:
        """Returns the result of the call. results: of the calls before it. others: its remaining arguments."""
        arguments = {name: results[place] for name, place in self.values} | others
        if self.request_name is not None:
            arguments[self.request_name] = request
        return await self.call(**arguments)


class DirectRoute(Route):
    """A route whose endpoint and dependencies are coroutines that take the request, each other, strings or JSON."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Raises TypeError if the endpoint or a dependency takes anything else."""
        super().__init__(path, endpoint, **options)
        model = self.response_model
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise TypeError(f"{path}: a direct route answers with a model")
        if self.body_field is not None and not self.takes_json:
            raise TypeError(f"{path}: a direct route takes JSON or nothing")
        if any(field.field_info.annotation is not str for field in self.dependant.path_params):
            raise TypeError(f"{path}: a direct route's path has strings only")
        self._value_type = TypeAdapter[Any]((self.body_field and self.body_field.field_info.annotation) or Any)
        self._value_name = next((field.name for field in self.dependant.body_params), "")
        self._model: type[BaseModel] = model
        self._steps: list[_Step | Rule] = []  # in order; each has its place
        places: dict[Any, int] = {}  # by call
        for child in self.dependant.dependencies:
            self._add(child, places)
        self._endpoint = self._step(self.dependant, places)

    def _add(self, dependant: Dependant, places: dict[Any, int]) -> None:
        call: Any = dependant.call
        if call in places:
            return
        step: _Step | Rule
        if isinstance(call, Rule):
            step = call
        else:
            for child in dependant.dependencies:
                self._add(child, places)
            if dependant.path_params or dependant.body_params:
                raise TypeError(f"{self.path}: a direct route's dependency takes only the request and other results")
            step = self._step(dependant, places)
        places[call] = len(self._steps)
        self._steps.append(step)

    def _step(self, dependant: Dependant, places: dict[Any, int]) -> _Step:
        call = dependant.call
        others = (
            dependant.query_params,
            dependant.header_params,
            dependant.cookie_params,
            dependant.http_connection_param_name,
            dependant.websocket_param_name,
            dependant.response_param_name,
            dependant.background_tasks_param_name,
            dependant.security_scopes_param_name,
        )
        if call is None or any(others) or not _is_coroutine(call):
            raise TypeError(f"{self.path}: a direct route cannot call {call!r}")
        values = tuple((child.name, places[child.call]) for child in dependant.dependencies if child.name)
        return _Step(call, dependant.request_param_name, values)

    async def answer_directly(self, request: Request) -> Response:
        """Answers a request whose caller was admitted and whose body was read. Raises RequestValidationError."""
        results: list[Any] = []
        for step in self._steps:
            results.append(step.admitted(request) if isinstance(step, Rule) else await step.run(request, results))
        others: dict[str, Any] = dict(request.path_params)
        if self.body_field is not None:
            others[self._value_name] = await self._value(request)
        answer = await self._endpoint.run(request, results, **others)
        if isinstance(answer, Response):
            return answer
        if not isinstance(answer, self._model):
            raise TypeError(f"{self.path} answers {type(answer).__name__}, not {self._model.__name__}")
        body = answer.model_dump_json(by_alias=True).encode()
        return Response(body, self.status_code or 200, media_type="application/json")

    async def _value(self, request: Request) -> Any:
        value = request.value if isinstance(request, JsonRequest) else None
        if value is None and not await request.body():
            raise RequestValidationError([_MISSING])
        try:
            return self._value_type.validate_python(value, from_attributes=True)
        except ValidationError as error:
            errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            raise RequestValidationError(errors) from error


def _is_coroutine(call: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


class Shortcut:
    """ASGI middleware, the innermost one, that answers the requests of direct routes."""

    def __init__(self, app: ASGIApp, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, DirectRoute)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        route = self._match(scope)
        if route is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await route.answer_with(route.answer_directly, Request(scope, receive, send))
        except RequestValidationError as error:
            raise from_validation(error) from error
        await response(scope, receive, send)

    def _match(self, scope: Scope) -> DirectRoute | None:
        """Finds the direct route of a request, and notes the match in the scope as the router does."""
        if scope["type"] != "http" or scope.get("root_path"):
            return None
        for route in self._routes:
            if scope["method"] in (route.methods or ()) and (match := route.path_regex.match(scope["path"])):
                scope["route"], scope["path_params"] = route, match.groupdict()
                return route
        return None
