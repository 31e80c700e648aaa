"""This device's routes: OpenAI's `models`, `completions` and `chat/completions`, classification and feedback.

Texts are generated one at a time, in order of arrival, by one thread.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from device_agent.serving.feedback import Feedback, FeedbackRequest
from device_agent.serving.models import DeviceAnswers, DeviceModels, classify
from shared.errors import (
    BadRequest,
    Forbidden,
    InvalidRequest,
    MobizoError,
    NotFound,
    TooLarge,
    TooManyRequests,
    TooSlow,
    Unauthorized,
)
from shared.invalid_fields import first_invalid
from shared.openai.answers import (
    ChatWriter,
    CompletionWriter,
    FinishedText,
    ResponsePiece,
    Writer,
    error_object,
    events,
)
from shared.openai.completions import ModelList
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.scoring import ClassifyRequest

MAX_BODY_BYTES = 4_000_000
BODY_SECONDS = 30  # that a body may take to arrive
MAX_MESSAGE = 300  # characters of one validation message
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "5"}}  # by status
Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Texts = TypeVar("Texts", ChatRequest, CompletionRequest)


class WrongMethod(BadRequest, status=405, code="method-not-allowed"):
    """This address takes another method: GET for models, POST for completions and feedback."""


class DeviceRoutes:
    """An ASGI application. queue: requests that may generate or wait; more are refused. feedback: None: refused."""

    def __init__(self, models: DeviceModels, token: str, queue: int, feedback: Feedback | None = None) -> None:
        self._models, self._token, self._queue, self._feedback = models, token.encode(), queue, feedback
        self._thread = ThreadPoolExecutor(1, "inference")
        self._turn = asyncio.Lock()
        self._admitted = 0
        self._routes = Starlette(
            routes=[
                Route("/v1/models", self._list),
                Route("/v1/models/{name:path}", self._find),
                Route("/v1/completions", partial(self._answer, CompletionRequest, CompletionWriter), methods=["POST"]),
                Route("/v1/chat/completions", partial(self._answer, ChatRequest, ChatWriter), methods=["POST"]),
                Route("/v1/adapters/{name:path}/classify", self._classify, methods=["POST"]),
                Route("/v1/feedback", self._rate, methods=["POST"]),
            ],
            exception_handlers={404: _refuse, 405: _refuse, MobizoError: _refuse, ClientDisconnect: _refuse},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request. Without the bearer token it is refused, and its body is not read."""
        scheme, _, token = Headers(scope=scope).get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode("latin-1"), self._token):
            await self._routes(scope, receive, send)
        else:
            detail = "the bearer token is missing or wrong; `mobizo-agent serve` names the file that has it"
            await _error(Unauthorized(detail))(scope, receive, send)

    def close(self) -> None:
        """Waits for the token in progress and frees the program's memory."""
        self._thread.submit(self._models.close)
        self._thread.shutdown()

    async def _list(self, _request: Request) -> Response:
        return _json(ModelList(data=tuple(await self._run(self._models.list_models))))

    async def _find(self, request: Request) -> Response:
        return _json(await self._run(lambda: self._models.find(request.path_params["name"])))

    async def _classify(self, request: Request) -> Response:
        classify_request = await _read(ClassifyRequest, request)
        steps = self._steps(request, classify(self._models, request.path_params["name"], classify_request))
        async with aclosing(steps):
            async for result in steps:
                return _json(result)
        raise ClientDisconnect

    async def _rate(self, request: Request) -> Response:
        if self._feedback is None:
            raise Forbidden("this device takes no feedback; start `mobizo-agent serve` with --feedback DATASET")
        return _json(await self._feedback.add(await _read(FeedbackRequest, request)))

    async def _answer(
        self, form: type[Texts], write: Callable[[Texts, DeviceAnswers], Writer], request: Request
    ) -> Response:
        """Answers a request for texts. form: of its body. write: returns what writes its answer."""
        body = await _read(form, request)
        answers = DeviceAnswers(self._models, body)
        writer = write(body, answers)
        steps = self._texts(request, answers, writer.id)
        if not answers.request.stream:
            async with aclosing(steps):
                return _json(writer.response([step async for step in steps if isinstance(step, FinishedText)]))
        first = await anext(steps, None)  # what is refused before the first token is answered as without a stream
        if first is None:
            raise ClientDisconnect
        stream = events(first, steps, writer)
        # A client that disconnects may leave the stream suspended between two events.
        return StreamingResponse(stream, media_type="text/event-stream", background=BackgroundTask(stream.aclose))

    async def _texts(
        self, request: Request, answers: DeviceAnswers, answer_id: str
    ) -> AsyncGenerator[ResponsePiece, None]:
        """Yields the steps of a request, whose texts are remembered for feedback."""
        async with aclosing(self._steps(request, answers.steps())) as steps:
            async for step in steps:
                if self._feedback is not None and isinstance(step, FinishedText):
                    self._feedback.remember(answer_id, answers.request, step.text)
                yield step

    async def _steps(self, request: Request, steps: Generator[Result, None, None]) -> AsyncGenerator[Result, None]:
        """Yields the steps of a request in its turn. Ends early if the client has disconnected."""
        if self._admitted >= self._queue:
            raise TooManyRequests(f"{self._queue} requests are in progress or waiting; try again when one has ended")
        self._admitted += 1
        try:
            async with self._turn:
                try:
                    while not await request.is_disconnected():
                        step = await self._run(lambda: next(steps, None))
                        if step is None:
                            return
                        yield step
                finally:
                    self._thread.submit(steps.close)  # after the step that may still be computed
        finally:
            self._admitted -= 1

    async def _run(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


async def _read(model: type[Body], request: Request) -> Body:
    """Returns a request's body. Raises TooLarge, TooSlow, ClientDisconnect, or InvalidRequest naming a wrong field."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise TooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
        return model.model_validate_json(body)
    except TimeoutError as error:
        raise TooSlow from error
    except ValidationError as error:
        first = first_invalid(error)
        field, message = first.path[:100] or "body", first.message[:MAX_MESSAGE]
        raise InvalidRequest(f"{field}: {message}", errors=[{"field": field, "message": message}]) from error


async def _refuse(_request: Request, error: Exception) -> Response:
    """Answers an error of a route, or of Starlette, which found none (404) or none for the method (405)."""
    if isinstance(error, MobizoError):
        return _error(error)
    routes = (
        "the routes are /v1/completions, /v1/chat/completions, /v1/feedback, /v1/models and /v1/adapters/NAME/classify"
    )
    return _error(WrongMethod() if getattr(error, "status_code", None) == WrongMethod.status else NotFound(routes))


def _error(error: MobizoError) -> Response:
    return JSONResponse(error_object(error), error.status, _HEADERS.get(error.status))


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")
