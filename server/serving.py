"""Running the application: a listening socket, uvicorn, the workers beside it, and an orderly stop.

Refuses to speak in clear to other machines. Knows no routes.

The stop: no connection is accepted any more, who waits is answered at once, requests under way have the grace to end,
and meanwhile the workers give back what they compile. A second signal ends the process where it stands.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog
import uvicorn

from server.app import create_app
from server.fleet import worker_fleet
from server.http.place import Place
from server.metrics.listener import metrics_listener
from server.settings import Settings
from shared.errors import BadRequest, Unavailable

_log = structlog.get_logger()


class Unsafe(BadRequest):
    """Tokens and adapters would cross the network in clear."""

    code, title = "unsafe", "Unsafe setting"


@dataclass(frozen=True)
class Tls:
    """Certificate chain and private key, PEM."""

    certificate: Path
    key: Path


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_safe(host: str, tls: Tls | None, insecure: bool) -> None:
    """Raises Unsafe for another host than this machine without TLS."""
    if not is_loopback(host) and tls is None and not insecure:
        raise Unsafe(
            f"host {host} is reachable from other machines, and tokens would travel in clear: give --tls-cert and "
            "--tls-key, or --insecure-dev on a network you trust"
        )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Unavailable if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise Unavailable(f"cannot listen on {host} port {port}: {error.strerror or error}") from error


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
    listening = listen(settings.host, settings.port)
    server = _Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
            timeout_graceful_shutdown=settings.grace_seconds,
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
