"""Responses that are sent while they are computed, and work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from server.web.openapi import Responses
from server.web.state import AppState
from shared.errors import BadRequest

EVENTS = "text/event-stream"
STREAMED: Responses = {200: {"content": {EVENTS: {"schema": {"type": "string"}}}}}
Returned = TypeVar("Returned")


async def event_stream(state: AppState, events: AsyncGenerator[bytes, None]) -> StreamingResponse:
    """Returns a response of events. A failure before the first event is raised and answered as by any route."""
    first = await anext(events)

    async def tracked() -> AsyncIterator[bytes]:
        with state.meters.streams.track_inprogress():
            async with aclosing(events):
                yield first
                async for event in events:
                    yield event

    return StreamingResponse(tracked(), media_type=EVENTS, headers={"X-Accel-Buffering": "no"})


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
