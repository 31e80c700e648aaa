"""Bytes that go from the system's memory of a file to a connection without passing through this process.

ASGI names an extension for it, which uvicorn lacks: `http.response.zerocopysend`. `ZeroCopy` adds it where it can be
had: uvicorn's h11 protocol, asyncio's own loop, no TLS of our own. Elsewhere it is not offered, and whoever sends files
sends pieces. Knows no files' names and no rights.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

EXTENSION = "http.response.zerocopysend"


class _Span:
    """Stands for bytes that h11 counts and never sees."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class ZeroCopy:
    """Around the whole application, next to the server whose connection it writes to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request, with the extension if it can be had."""
        cycle = getattr(send, "__self__", None)
        if not isinstance(cycle, RequestResponseCycle) or not _can(cycle.transport):
            await self._app(scope, receive, send)
            return

        async def send_all(message: Message) -> None:
            if message["type"] == EXTENSION:
                await _send_file(cycle, message)
                if not message["more_body"]:
                    await send({"type": "http.response.body", "body": b""})
            else:
                await send(message)

        extensions = {**scope.get("extensions", {}), EXTENSION: {}}
        await self._app({**scope, "extensions": extensions}, receive, send_all)


def _can(transport: asyncio.Transport) -> bool:
    plain = transport.get_extra_info("sslcontext") is None
    return plain and isinstance(asyncio.get_running_loop(), asyncio.SelectorEventLoop)


async def _send_file(cycle: RequestResponseCycle, message: Message) -> None:
    """Sends `count` bytes of `file` from `offset` on, as part of an answer that has begun.

    Raises ConnectionError if the client has gone away, EOFError if the file is shorter than that.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected or cycle.transport.is_closing():
        raise ConnectionResetError("the client has gone away")
    span = cast(Any, _Span(message["count"]))
    loop = asyncio.get_running_loop()
    for part in cycle.conn.send_with_data_passthrough(h11.Data(data=span)) or ():
        if cast(Any, part) is span:
            # Where the file's place knows no sendfile, asyncio reads and writes instead.
            sent = await loop.sendfile(cycle.transport, message["file"], message["offset"], message["count"])
            if sent != message["count"]:
                # What was promised cannot be sent any more, so the connection must not look whole.
                cycle.transport.abort()
                raise EOFError(f"a file ended after {sent} of {message['count']} bytes")
        else:
            cycle.transport.write(part)
