"""Running the application: a listening socket, uvicorn, the workers beside it, and an orderly stop.

Knows no routes; what it would be unsafe with, server.safety says.

The stop: no connection is accepted any more, who waits is answered at once, requests under way have the grace to end,
and meanwhile the workers give back what they compile. A second signal ends the process where it stands.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog
import uvicorn

from server.app import create_app
from server.fleet import worker_fleet
from server.http.place import Place
from server.http.zero_copy import ZeroCopy
from server.metrics.listener import metrics_listener
from server.safety import Tls
from server.settings import Settings
from shared.errors import Unavailable

KEEP_ALIVE_SECONDS = 30
_log = structlog.get_logger()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Unavailable if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    # Connections have it from here; asyncio sets it only on sockets that name their protocol. Without it the end of an
    # answer waits until the client has confirmed its beginning, which clients put off by 40 ms.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class _Uvicorn(uvicorn.Server):
    announce: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to answer, and says so."""
        await super().startup(sockets)
        if self.started:
            self.announce()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to us: uvicorn would raise them again before the workers are stopped."""
        yield


async def serve(settings: Settings, tls: Tls | None, workers: int, announce: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM; a second one exits at once.

    announce: called with the URL once requests are answered.
    """
    app = create_app(settings)
    # What has been made by now stays as long as the process: a full collection need not walk it, which would stop every
    # request for a tenth of a second.
    gc.collect()
    gc.freeze()
    listening = listen(settings.host, settings.port)
    server = _Uvicorn(
        uvicorn.Config(
            ZeroCopy(app),
            log_config=None,
            access_log=False,
            server_header=False,
            # Nobody is believed about whose request it is, but the proxies that the operator named.
            proxy_headers=bool(settings.forwarded_allow_ips),
            forwarded_allow_ips=settings.forwarded_allow_ips,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
            timeout_graceful_shutdown=settings.grace_seconds,
            # Longer than the pause between a device's heartbeats, which would else connect anew for each.
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
    )

    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    url = f"{'https' if tls else 'http'}://{host}:{listening.getsockname()[1]}"
    server.announce = lambda: announce(url)

    place: Place = app.state.place
    async with worker_fleet(settings, workers) as fleet:

        def stop(number: int) -> None:
            if place.closing.begun:
                # The workers die with this process, and what they compile is another's when its time is over.
                os._exit(128 + number)
            _log.info("stopping", signal=signal.Signals(number).name)
            place.closing.begin()
            server.should_exit = True
            fleet.stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        with metrics_listener(place.exposition, settings.metrics_port):
            await server.serve([listening])
    _log.info("stopped")
