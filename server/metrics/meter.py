"""The middleware that measures every request. Plain ASGI, so that streams pass through unbuffered. Knows no route."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.metrics.meters import Meters

NO_ROUTE = "none"
UNANSWERED = 499  # the client went away, or the server was stopped


class Meter:
    """Around everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        meters: Meters = scope["app"].state.place.meters
        began = time.perf_counter()
        answered, received = False, 0

        def route() -> str:
            # The router has written into the scope what it found.
            return getattr(scope.get("route"), "path", NO_ROUTE)

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal answered
            # Before it is sent: who was answered finds that counted.
            if message["type"] == "http.response.start":
                answered = True
                meters.answered(scope["method"], route(), message["status"], time.perf_counter() - began)
                meters.received(route(), received)
            # Of what the system sends from a file by itself, there is only the count.
            meters.sent(route(), len(message.get("body", b"")) + message.get("count", 0))
            await send(message)

        with meters.running.track_inprogress():
            try:
                await self._app(scope, receive_counted, send_counted)
            finally:
                if not answered:
                    meters.answered(scope["method"], route(), UNANSWERED, time.perf_counter() - began)
                    meters.received(route(), received)
