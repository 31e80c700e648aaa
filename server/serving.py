"""Runs the application: a listening socket, uvicorn, the worker processes, and an orderly stop.

`server.operations.safety` rejects unsafe settings before. On a signal the server accepts no connection any more,
answers waiting requests at once, and gives requests in progress the grace to end, while the workers release their
tasks. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import uvicorn

from server.app import create_app
from server.operations.fleet import worker_fleet
from server.operations.safety import Tls
from server.settings import Settings
from server.web.connections import (
    KEEP_ALIVE_SECONDS,
    ConnectionLimits,
    DeadlineProtocol,
    Listener,
    raise_descriptor_limit,
)
from server.web.state import AppState
from shared.errors import Unavailable

_log = structlog.get_logger()

# New objects before a collection of the young ones, and collections of one generation before one of the next. With
# Python's 700, 10 and 10 the objects of a request in progress reach the last generation, whose collection walks through
# every connection: with 10,000 of them a profile had pauses of 1.8 s, which are gone since.
COLLECTION_THRESHOLDS = 20_000, 20, 50
# Seconds that a thread computes before the interpreter runs another one. A request waits for its turn after each of its
# queries; with Python's 5 ms and four busy threads of another tenant that is 20 ms each time.
SWITCH_SECONDS = 0.001


def listen(host: str, port: int, limits: ConnectionLimits) -> Listener:
    """Returns a listening socket. Raises Unavailable if the address is taken or is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    # Connections inherit it; asyncio sets it only on sockets that name their protocol. Without it the end of a response
    # waits until the client has acknowledged its beginning, which clients delay by 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Listener(listening, limits)


class _Uvicorn(uvicorn.Server):
    announce: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to answer, and announces it."""
        await super().startup(sockets)
        if self.started:
            self.announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to `serve`: uvicorn would raise them again before the workers are stopped."""
        yield


async def serve(settings: Settings, tls: Tls | None, workers: int, announce: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; a second one exits at once.

    announce: called with the URL once requests are answered.
    """
    app = create_app(settings)
    # What exists by now lives as long as the process. A full collection would walk through it and stop every request
    # for a tenth of a second.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_descriptor_limit()
    listening = listen(settings.host, settings.port, ConnectionLimits.of(settings))
    server = _Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            http=DeadlineProtocol.of(listening),
            # Only the proxies that the operator named may state whose request they forward.
            proxy_headers=bool(settings.forwarded_allow_ips),
            forwarded_allow_ips=settings.forwarded_allow_ips,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
            timeout_graceful_shutdown=settings.grace_seconds,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if tls else 'http'}://{host}:{listening.getsockname()[1]}"
    server.announce = lambda: announce(url)

    state: AppState = app.state.mobizo
    async with worker_fleet(settings, workers) as stop_workers:

        def stop(number: int) -> None:
            if state.shutdown.begun:
                # The workers die with this process; their tasks are taken over once their leases end.
                os._exit(128 + number)
            _log.info("stopping", signal=signal.Signals(number).name)
            state.shutdown.begin()
            server.should_exit = True
            stop_workers()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await server.serve([listening])
    _log.info("stopped")
