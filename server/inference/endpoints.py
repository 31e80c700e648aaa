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
from server.inference import responses as answers
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
Found = TypeVar("Found")
EVENTS = "text/event-stream"
UNBUFFERED = {"X-Accel-Buffering": "no"}
REFUSALS: tuple[type[MobizoError], ...] = (
    *(UnknownBase, AdapterNotFound, RevisionNotFound, VersionHeld, BaseMismatch, InvalidTask, TextTooLong),
    *(ScorerOff, ScorerBusy, ScorerStopped, ScorerLate, ScorerFull, BaseNotServed, Damaged),
)
STREAMED: Responses = {200: {"content": {EVENTS: {"schema": {"type": "string"}}}}}


@router.post("/score", responses=raises(*REFUSALS, InvalidDataset))
async def score(principal: Asker, request: ScoreRequest, asker: Request, state: State) -> ScoreResult:
    """Returns the log-probabilities of answers after their prompts. Each row has its own adapter; rows share batches.

    A score does not depend on the other rows of a request. Texts are read whole, up to the base's context.
    """
    return await while_there(asker, answers.score(state, principal.tenant, request))


@router.post("/generate", response_model=GenerateResult, responses=STREAMED | raises(*REFUSALS))
async def generate(principal: Asker, request: GenerateRequest, asker: Request, state: State) -> Any:
    """Continues a prompt. With `stream`, sends server-sent events: `text` pieces, then `end` with the whole result.

    A stream that fails ends with a `problem` event.
    """
    generation = answers.TextGeneration(
        state,
        principal.tenant,
        TextRequest(lambda _: request.prompt, **request.model_dump(exclude={"prompt", "stream"})),
    )
    if not request.stream:
        return await while_there(asker, whole_text(generation))
    pieces = generation.pieces()
    # What is refused at once is answered as by any route.
    first = await anext(pieces)
    return StreamingResponse(generated_events(state, first, pieces), media_type=EVENTS, headers=UNBUFFERED)


async def whole_text(generation: answers.TextGeneration) -> GenerateResult:
    """Returns the result of a generation once it is complete."""
    async with aclosing(generation.pieces()) as pieces:
        return [piece async for piece in pieces if isinstance(piece, GenerateResult)][-1]


async def generated_events(
    state: State, first: Piece | GenerateResult, rest: AsyncGenerator[Piece | GenerateResult, None]
) -> AsyncIterator[bytes]:
    """Yields the server-sent events of a text that is being generated, whose first piece has come."""
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


async def while_there(asker: Request, work: Coroutine[Any, Any, Found]) -> Found:
    """Returns the result of `work`; cancels it when the client disconnects."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(asker))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise BadRequest("nobody waits for the answer any more")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(asker: Request) -> None:
    """Returns when the client has gone."""
    while (await asker.receive())["type"] != "http.disconnect":
        pass
