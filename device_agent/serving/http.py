"""An HTTP/1.1 server for few clients: asyncio and h11, with limits of size, time and number.

A request's credentials are checked as soon as its headers are read. A request without them gets its answer then; its
body is never read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import h11

from shared.errors import BadRequest, MobizoError, TooLarge, Unavailable
from shared.openai.answers import error_object

CHUNK = 65_536  # bytes read at a time
LINGER_SECONDS = 1.0  # that a refused client may send before the connection is closed; the bytes are dropped
JSON = "application/json"


class HeadersTooLarge(TooLarge):
    """The headers are too large; send fewer."""

    status, code, title = 431, "headers-too-large", "Headers too large"


class TooSlow(BadRequest):
    """The request did not arrive in time; send it again, faster."""

    status, code, title = 408, "too-slow", "Request too slow"


@dataclass(frozen=True)
class Limits:
    """What one client may take. Sizes in bytes, times in seconds."""

    header_bytes: int = 16_384
    body_bytes: int = 4_000_000
    header_seconds: float = 10.0
    body_seconds: float = 30.0
    idle_seconds: float = 60.0  # between two requests of a connection
    write_seconds: float = 30.0  # that a client may leave a piece of an answer unread
    connections: int = 32


@dataclass(frozen=True)
class Request:
    """A request without its body. connected: whether the client is still there."""

    method: str
    path: str
    headers: dict[str, str]
    connected: Callable[[], bool]


@dataclass(frozen=True)
class Response:
    """An answer: a body, or the events of a stream."""

    body: bytes = b""
    events: AsyncGenerator[bytes, None] | None = None
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, value: Any) -> Response:
        """Returns an answer in JSON."""
        return cls(json.dumps(value).encode())

    @classmethod
    def error(cls, error: MobizoError) -> Response:
        """Returns an error in OpenAI's form."""
        headers = {401: ("www-authenticate", "Bearer"), 429: ("retry-after", "1"), 503: ("retry-after", "5")}
        extra = (headers[error.status],) if error.status in headers else ()
        return cls(json.dumps(error_object(error)).encode(), status=error.status, headers=extra)


# Takes a request whose headers alone are read, and raises MobizoError or returns the function that takes its body.
Handler = Callable[[Request], Callable[[bytes], Awaitable[Response]]]


class HttpServer:
    """Listens on one address and answers by `handler`. `limits` hold for each connection."""

    def __init__(self, handler: Handler, limits: Limits) -> None:
        self._handler, self._limits = handler, limits
        self._connections: dict[asyncio.Task[None], _Connection] = {}

    async def start(self, host: str, port: int) -> int:
        """Begins to listen; returns the port. Raises OSError."""
        self._server = await asyncio.start_server(self._connected, host, port, limit=CHUNK)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, seconds: float) -> None:
        """Stops listening, gives requests in progress `seconds` to end, and cuts the rest."""
        self._server.close()
        busy = [task for task, connection in self._connections.items() if not connection.idle]
        if busy:
            await asyncio.wait(busy, timeout=seconds)
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101  # start_server calls this in a task
        open_now, limit = len(self._connections), self._limits.connections
        self._connections[task] = connection = _Connection(reader, writer, self._handler, self._limits)
        try:
            if open_now >= 2 * limit:
                pass  # refusals take connections too
            elif open_now >= limit:
                await connection.refuse(Unavailable("too many connections are open; close some, or try again later"))
            else:
                while self._server.is_serving() and await connection.answer_one():
                    pass
        except (OSError, TimeoutError, h11.LocalProtocolError):
            pass  # the client is gone, or does not read
        except asyncio.CancelledError:
            pass  # the end of the server, which asyncio would report as an error
        finally:
            del self._connections[task]
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class _Connection:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler, limits: Limits
    ) -> None:
        self._reader, self._writer, self._handler, self._limits = reader, writer, handler, limits
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=limits.header_bytes)
        self._first = True
        self.idle = False  # whether it waits for a request

    async def answer_one(self) -> bool:
        """Answers one request. Returns whether the connection stays open."""
        try:
            head = await self._head()
            if head is None:
                return False
            take = self._handler(self._request(head))
            response = await take(await self._body(head))
        except h11.RemoteProtocolError as error:
            large = error.error_status_hint == 431
            await self.refuse(HeadersTooLarge() if large else BadRequest(f"this is not HTTP: {error}"))
            return False
        except MobizoError as error:
            response = Response.error(error)
            if self._http.their_state is not h11.DONE:  # the body was not read
                await self.refuse(error)
                return False
        await self._respond(response)
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def refuse(self, error: MobizoError) -> None:
        """Answers with an error and ends the connection."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            await self._respond(Response.error(error), close=True)
            # A connection that is closed with unread bytes is reset, and the client may never see the answer.
            self._writer.write_eof()
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    while await self._reader.read(CHUNK):
                        pass

    def _request(self, head: h11.Request) -> Request:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        path = head.target.decode("latin-1").partition("?")[0]
        return Request(head.method.decode("latin-1"), path, headers, self._is_connected)

    def _is_connected(self) -> bool:
        return not self._reader.at_eof() and self._reader.exception() is None

    async def _head(self) -> h11.Request | None:
        """Returns the head of the next request; None if the client ends or is idle too long."""
        seconds = self._limits.header_seconds if self._first else self._limits.idle_seconds
        self._first, self.idle = False, True
        try:
            async with asyncio.timeout(seconds):
                event = await self._next()
        except TimeoutError:
            return None
        finally:
            self.idle = False
        return event if isinstance(event, h11.Request) else None

    async def _body(self, head: h11.Request) -> bytes:
        """Returns the body. Raises TooLarge, before it is read if its size is announced, or TooSlow."""
        limit = self._limits.body_bytes
        too_large = TooLarge(f"the body has more than {limit} bytes")
        if any(name == b"content-length" and int(value) > limit for name, value in head.headers):
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                while isinstance(event := await self._next(), h11.Data):
                    body += event.data
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise TooSlow from error
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionAbortedError
        return bytes(body)

    async def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            if self._http.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._http.receive_data(await self._reader.read(CHUNK))
        return event

    async def _respond(self, response: Response, *, close: bool = False) -> None:
        headers = [("content-type", JSON if response.events is None else "text/event-stream"), *response.headers]
        headers += (
            [("cache-control", "no-store"), ("connection", "close")] if close else [("cache-control", "no-store")]
        )
        if response.events is None:
            headers.append(("content-length", str(len(response.body))))
        phrase = HTTPStatus(response.status).phrase.encode()
        await self._send(h11.Response(status_code=response.status, headers=headers, reason=phrase))
        if response.events is None:
            await self._send(h11.Data(data=response.body))
        else:
            async with aclosing(response.events) as events:
                async for event in events:
                    await self._send(h11.Data(data=event))
        await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            async with asyncio.timeout(self._limits.write_seconds):
                await self._writer.drain()


def bearer(headers: dict[str, str]) -> Iterator[str]:
    """Yields the bearer token of a request, if it has one."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        yield token.strip()
