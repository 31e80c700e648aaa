"""The middleware that measures every request. Plain ASGI, so that streams pass through unbuffered. Knows no route."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.metrics.meters import Meters

NO_ROUTE = "none"


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
        status, seconds, received, sent = 500, None, 0, 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def send_counted(message: Message) -> None:
            nonlocal status, seconds, sent
            if message["type"] == "http.response.start":
                status, seconds = message["status"], time.perf_counter() - began
            sent += len(message.get("body", b""))
            await send(message)

        try:
            with meters.running.track_inprogress():
                await self._app(scope, receive_counted, send_counted)
        finally:
            # The router has written into the scope what it found.
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            meters.answered(scope["method"], route, status, time.perf_counter() - began if seconds is None else seconds)
            meters.carried(route, received, sent)
