"""OpenAI's routes on this device: `/v1/models`, `/v1/completions` and `/v1/chat/completions`.

Texts are generated one at a time, in order of arrival, by one thread.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TypeVar
from urllib.parse import unquote

from pydantic import BaseModel, ValidationError

from device_agent.serving.http import Request, Response, bearer
from device_agent.serving.models import DeviceAnswers, DeviceModels
from shared.errors import BadRequest, InvalidRequest, NotFound, TooManyRequests, Unauthorized
from shared.invalid_fields import first_invalid
from shared.openai.answers import ChatWriter, CompletionWriter, FinishedText, ResponsePiece, Writer, events
from shared.openai.models import ChatRequest, CompletionRequest, ModelList

PREFIX = "/v1/models/"
MOST_MESSAGE = 300  # characters of one validation message
Result = TypeVar("Result")
Body = TypeVar("Body", bound=BaseModel)
Take = Callable[[bytes], Awaitable[Response]]


class WrongMethod(BadRequest):
    """This address takes another method: GET for models, POST for completions."""

    status, code, title = 405, "method-not-allowed", "Method not allowed"


class DeviceRoutes:
    """Answers requests that carry the token. queue: requests that may generate or wait; more are refused."""

    def __init__(self, models: DeviceModels, token: str, queue: int) -> None:
        self._models, self._token, self._queue = models, token.encode(), queue
        self._thread = ThreadPoolExecutor(1, "inference")
        self._turn = asyncio.Lock()
        self._admitted = 0

    def __call__(self, request: Request) -> Take:
        """Returns what takes the request's body. Raises Unauthorized, NotFound or WrongMethod, before it is read."""
        tokens = [token.encode("utf-8", "surrogateescape") for token in bearer(request.headers)]
        if not tokens or not hmac.compare_digest(tokens[0], self._token):
            raise Unauthorized("the bearer token is missing or wrong; `mobizo-agent serve` names the file that has it")
        method, path = request.method, request.path.rstrip("/")
        posts: dict[str, Take] = {
            "/v1/completions": lambda body: self._complete(request, body),
            "/v1/chat/completions": lambda body: self._chat(request, body),
        }
        is_model = path == "/v1/models" or path.startswith(PREFIX)
        if not is_model and path not in posts:
            raise NotFound(f"there is nothing at {path[:100] or '/'}; the routes are {', '.join(posts)}, /v1/models")
        if method != ("GET" if is_model else "POST"):
            raise WrongMethod
        return (lambda _body: self._list(path)) if is_model else posts[path]

    def close(self) -> None:
        """Waits for the token in progress and frees the program's memory."""
        self._thread.submit(self._models.close)
        self._thread.shutdown()

    async def _list(self, path: str) -> Response:
        if path == "/v1/models":
            model_list = ModelList(data=tuple(await self._run(self._models.list_models)))
            return Response.json(model_list.model_dump(mode="json"))
        name = unquote(path.removeprefix(PREFIX))
        return Response.json((await self._run(lambda: self._models.find(name))).model_dump(mode="json"))

    async def _chat(self, request: Request, body: bytes) -> Response:
        chat_request = _parse(ChatRequest, body)
        answers = DeviceAnswers(self._models, chat_request)
        return await self._answer(request, answers, ChatWriter(chat_request, answers))

    async def _complete(self, request: Request, body: bytes) -> Response:
        completion_request = _parse(CompletionRequest, body)
        answers = DeviceAnswers(self._models, completion_request)
        return await self._answer(request, answers, CompletionWriter(completion_request, answers))

    async def _answer(self, request: Request, answers: DeviceAnswers, writer: Writer) -> Response:
        steps = self._steps(request, answers)
        if not answers.request.stream:
            async with aclosing(steps):
                ended = [step async for step in steps if isinstance(step, FinishedText)]
            return Response.json(writer.response(ended).model_dump(mode="json"))
        first = await anext(steps)  # what is refused before the first token is answered as without a stream
        return Response(events=events(first, steps, writer))

    async def _steps(self, request: Request, answers: DeviceAnswers) -> AsyncGenerator[ResponsePiece, None]:
        """Yields the steps of a request in its turn. Ends early with ConnectionAbortedError if the client is gone."""
        if self._admitted >= self._queue:
            raise TooManyRequests(f"{self._queue} requests are in progress or waiting; try again when one has ended")
        self._admitted += 1
        try:
            async with self._turn:
                steps = answers.steps()
                try:
                    while request.connected():
                        step = await self._run(lambda: next(steps, None))
                        if step is None:
                            return
                        yield step
                    raise ConnectionAbortedError
                finally:
                    self._thread.submit(steps.close)  # after the step that may still be computed
        finally:
            self._admitted -= 1

    async def _run(self, function: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


def _parse(model: type[Body], body: bytes) -> Body:
    """Returns a body's model. Raises InvalidRequest naming the first wrong field."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        first = first_invalid(error)
        field, message = first.path[:100] or "body", first.message[:MOST_MESSAGE]
        raise InvalidRequest(f"{field}: {message}", errors=[{"field": field, "message": message}]) from error
