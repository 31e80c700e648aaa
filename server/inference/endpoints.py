"""Routes that score and generate."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.inference import responses
from server.inference.errors import (
    BaseNotServed,
    ScorerBusy,
    ScorerFull,
    ScorerLate,
    ScorerOff,
    ScorerStopped,
)
from server.inference.service import TextRequest
from server.storage.store import Damaged
from server.web.openapi import Responses, raises
from server.web.routes import Routes
from server.web.state import State
from shared.access import Scope
from shared.errors import (
    AdapterNotFound,
    BadRequest,
    BaseMismatch,
    InvalidDataset,
    InvalidTask,
    MobizoError,
    RevisionNotFound,
    UnknownBase,
    VersionHeld,
)
from shared.generated_text import Piece
from shared.scoring import GeneratedText, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult, TextTooLong

router = Routes(prefix="/v1", tags=["scoring"])
Asker = Annotated[Principal, needs(Scope.ADAPTERS_SCORE)]
Returned = TypeVar("Returned")
EVENTS = "text/event-stream"
UNBUFFERED = {"X-Accel-Buffering": "no"}
REFUSALS: tuple[type[MobizoError], ...] = (
    *(UnknownBase, AdapterNotFound, RevisionNotFound, VersionHeld, BaseMismatch, InvalidTask, TextTooLong),
    *(ScorerOff, ScorerBusy, ScorerStopped, ScorerLate, ScorerFull, BaseNotServed, Damaged),
)
STREAMED: Responses = {200: {"content": {EVENTS: {"schema": {"type": "string"}}}}}


@router.post("/score", responses=raises(*REFUSALS, InvalidDataset))
async def score(principal: Asker, request: ScoreRequest, connection: Request, state: State) -> ScoreResult:
    """Returns the log-probabilities of answers after their prompts. Each row has its own adapter; rows share batches.

    A score does not depend on the other rows of a request. Texts are read whole, up to the base's context.
    """
    return await cancelled_on_disconnect(connection, responses.score(state, principal.tenant, request))


@router.post("/generate", response_model=GenerateResult, responses=STREAMED | raises(*REFUSALS))
async def generate(principal: Asker, request: GenerateRequest, connection: Request, state: State) -> Any:
    """Continues a prompt. With `stream`, sends server-sent events: `text` pieces, then `end` with the whole result.

    A stream that fails ends with a `problem` event.
    """
    generation = responses.TextGeneration(
        state,
        principal.tenant,
        TextRequest(lambda _: request.prompt, **request.model_dump(exclude={"prompt", "stream"})),
    )
    if not request.stream:
        return await cancelled_on_disconnect(connection, whole_text(generation))
    pieces = generation.pieces()
    # A refusal before the first piece gets the status of any other route.
    first = await anext(pieces)
    return StreamingResponse(generated_events(state, first, pieces), media_type=EVENTS, headers=UNBUFFERED)


async def whole_text(generation: responses.TextGeneration) -> GenerateResult:
    """Returns the result of a generation once it is complete."""
    async with aclosing(generation.pieces()) as pieces:
        return [piece async for piece in pieces if isinstance(piece, GenerateResult)][-1]


async def generated_events(
    state: State, first: Piece | GenerateResult, rest: AsyncGenerator[Piece | GenerateResult, None]
) -> AsyncIterator[bytes]:
    """Yields the server-sent events of a text that is being generated. first: its first piece."""
    with state.meters.streams.track_inprogress():
        async with aclosing(rest):
            yield _event(first)
            try:
                async for piece in rest:
                    yield _event(piece)
            except MobizoError as error:
                yield _data("problem", json.dumps(error.problem()))


def _event(piece: Piece | GenerateResult) -> bytes:
    if isinstance(piece, GenerateResult):
        return _data("end", piece.model_dump_json())
    return _data("text", GeneratedText(text=piece.text).model_dump_json())


def _data(kind: str, text: str) -> bytes:
    return f"event: {kind}\ndata: {text}\n\n".encode()


async def cancelled_on_disconnect(connection: Request, call: Coroutine[Any, Any, Returned]) -> Returned:
    """Returns the result of `call`; cancels it when the client disconnects."""
    call_task, disconnect_task = asyncio.create_task(call), asyncio.create_task(_disconnected(connection))
    try:
        await asyncio.wait({call_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not call_task.done():
            raise BadRequest("the client disconnected before the answer was ready")
        return call_task.result()
    finally:
        for task in (call_task, disconnect_task):
            task.cancel()
        await asyncio.gather(call_task, disconnect_task, return_exceptions=True)


async def _disconnected(connection: Request) -> None:
    """Returns when the client has disconnected."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass
