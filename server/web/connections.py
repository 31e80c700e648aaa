"""Bounds on connections, so that idle, half-sent and unread ones cannot stop the server.

`Listener` closes connections beyond a number in all or of one address. `DeadlineProtocol` closes those whose request
line and headers do not arrive in time, and those whose client does not read. Bodies have a deadline in
`server.web.middleware`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.settings import Settings
from server.web.rate_limits import place_of

HEAD_SECONDS = 20  # for a request's line and headers, from the connection or from their first byte
STALLED_SECONDS = 120  # that a client may leave a response unread
KEEP_ALIVE_SECONDS = 30  # between requests; longer than the pause between a device's heartbeats
LOG_SECONDS = 60  # between two log lines about refused connections
REFUSED_AT_ONCE = 64  # connections that are refused before other work of the event loop has its turn
OTHER_DESCRIPTORS = 256  # kept for databases, files and worker processes
MOST_DESCRIPTORS = 65_536
_log = structlog.get_logger()


@dataclass(frozen=True)
class ConnectionLimits:
    """How many connections may be open.

    trusted: networks of proxies, whose connections count in all and not by address.
    """

    total: int
    of_address: int
    trusted: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> ConnectionLimits:
        """Returns the settings' limits, lowered to what this process's descriptors allow."""
        trusted = tuple(filter(None, settings.forwarded_allow_ips.split(",")))
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        total = min(settings.connections, max(descriptors - OTHER_DESCRIPTORS, descriptors // 2))
        return cls(total, settings.address_connections, trusted)


def raise_descriptor_limit() -> None:
    """Raises the process's limit of open files to what the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Connection(socket.socket):
    """An accepted connection that reports when it is closed."""

    closed: Callable[[], None] | None = None

    def close(self) -> None:
        """Closes the connection."""
        super().close()
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed()


class Listener(socket.socket):
    """A listening socket that bounds its connections. Connections beyond a bound are closed before TLS and HTTP."""

    def __init__(self, listening: socket.socket, limits: ConnectionLimits) -> None:
        """Takes a listening socket over."""
        super().__init__(fileno=listening.detach())
        self._limits = limits
        self._trusted = [ip_network(text, strict=False) for text in limits.trusted if text != "*"]
        self._trusts_all = "*" in limits.trusted
        self._open: Counter[str] = Counter()
        self._refused, self._logged = 0, float("-inf")
        # Closed for a moment to accept and refuse a connection when the process has no descriptor left.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts the next connection within the bounds, and closes those before it. Raises BlockingIOError."""
        for _ in range(REFUSED_AT_ONCE):
            try:
                plain, address = super().accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                raise
            except OSError as error:
                # The event loop would log each of these and try again at once.
                self._refuse_without_descriptor()
                self._note(error.strerror or str(error))
                continue
            sender = self._sender(address[0])
            if self._open.total() >= self._limits.total:
                plain.close()
                self._note(f"{self._limits.total} connections are open")
            elif sender and self._open[sender] >= self._limits.of_address:
                plain.close()
                self._note(f"{sender} has {self._limits.of_address} connections")
            else:
                self._open[sender] += 1
                connection = _Connection(fileno=plain.detach())
                connection.closed = partial(self._forget, sender)
                return connection, address
        raise BlockingIOError

    def close(self) -> None:
        """Closes the socket."""
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1

    def _sender(self, address: str) -> str:
        """Returns what counts as one sender; an empty text for a trusted proxy."""
        if self._trusts_all or any(ip_address(address) in network for network in self._trusted):
            return ""
        return place_of(address)

    def _forget(self, sender: str) -> None:
        self._open[sender] -= 1
        if not self._open[sender]:
            del self._open[sender]

    def _refuse_without_descriptor(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
        try:
            super().accept()[0].close()
        except OSError as error:
            raise BlockingIOError from error
        finally:
            try:
                self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._spare = -1

    def _note(self, reason: str) -> None:
        self._refused += 1
        now = time.monotonic()
        if now - self._logged >= LOG_SECONDS:
            _log.warning("connections-refused", count=self._refused, reason=reason)
            self._refused, self._logged = 0, now


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with deadlines for a request's head and for a client that does not read."""

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _unsent: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request. What follows a response and begins no request has the same deadline."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            _cancel(self._head)
            self._head = None
        elif self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the response's last bytes to be read."""
        super().on_response_complete()
        _cancel(self._unsent)
        self._unsent = self.loop.call_later(KEEP_ALIVE_SECONDS + STALLED_SECONDS, self._abort_unsent)

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        _cancel(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all deadlines."""
        for timer in (self._head, self._stalled, self._unsent):
            _cancel(timer)
        super().connection_lost(exc)

    def _abort_unsent(self) -> None:
        """Ends a connection that was closed by the server, whose client does not read its last bytes."""
        if self.transport.is_closing():
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
