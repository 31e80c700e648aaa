"""ASGI middleware that records latency and bytes of every request. Streams pass through unbuffered."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.web.meters import Meters

NO_ROUTE = "none"
UNANSWERED = 499  # the client disconnected, or the server was stopped


class Meter:
    """The outermost middleware; it records latency and bytes."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        meters: Meters = scope["app"].state.mobizo.meters
        began = time.perf_counter()
        answered, received = False, 0

        def route() -> str:
            # The router stores the matched route in the scope.
            return getattr(scope.get("route"), "path", NO_ROUTE)

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal answered
            # Recorded before sending, so that a client that has received the response finds it counted.
            if message["type"] == "http.response.start":
                answered = True
                meters.answered(scope["method"], route(), message["status"], time.perf_counter() - began)
                meters.received(route(), received)
            # A file sent by the operating system has a count instead of a body.
            meters.sent(route(), len(message.get("body", b"")) + message.get("count", 0))
            await send(message)

        with meters.running.track_inprogress():
            try:
                await self._app(scope, receive_counted, send_counted)
            finally:
                if not answered:
                    meters.answered(scope["method"], route(), UNANSWERED, time.perf_counter() - began)
                    meters.received(route(), received)
