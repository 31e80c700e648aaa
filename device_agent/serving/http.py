"""HTTP/1.1 for few clients: uvicorn with limits of size, time and number."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 16_384
MAX_CONNECTIONS = 32
HEAD_SECONDS = 10  # from a connection to the end of its first request's headers
IDLE_SECONDS = 60  # from a response to the end of the next request's headers
UNREAD_SECONDS = 30  # that a client may leave a piece of a response unread
STOP_SECONDS = 5  # that requests in progress may take when the server stops


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which also closes connections whose next request is incomplete or whose client does not read.

    uvicorn's timer of idle connections begins with the connection here, and ends when a request's headers are complete.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # asyncio's stubs have BaseTransport
        """Begins to wait for a request."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request, as uvicorn does, without ending the timer."""
        self.conn.receive_data(data)
        self.handle_events()

    def pause_writing(self) -> None:
        """The client reads more slowly than the server sends."""
        super().pause_writing()
        self._unread = self.loop.call_later(UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough for sending to continue."""
        super().resume_writing()
        self._unread.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises OSError."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Connections inherit it. Without it the events of a stream wait for acknowledgements, which clients delay.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def http_server(app: ASGIApp) -> uvicorn.Server:
    """Returns a server of `app` with the limits of this module."""
    config = uvicorn.Config(
        app,
        http=DeadlineProtocol,
        lifespan="off",
        log_config=None,
        log_level="error",  # warnings are about clients' mistakes
        access_log=False,
        headers=[("cache-control", "no-store")],
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        limit_concurrency=MAX_CONNECTIONS + 1,  # the first number that is refused
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    return uvicorn.Server(config)
