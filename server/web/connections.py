"""Bounds on connections and on their time, so that no client can stop the server by opening or holding them.

`Listener` bounds connections in all and of one address; at the bounds, connections that have shown no valid token make
room for others. `DeadlineProtocol` closes a connection if request line and headers do not arrive in time or the client
does not read, and reads data after a response slowly. Bodies have a deadline in `server.web.middleware`.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address, ip_network
from typing import Any

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.settings import Settings
from server.web.bodies import READ_BYTES
from server.web.state import place_of

HEAD_SECONDS = 20  # for a request's line and headers, from the connection or from their first byte
STALLED_SECONDS = 120  # that a client may leave a response unread
KEEP_ALIVE_SECONDS = 30  # between requests; longer than the pause between a device's heartbeats
LOG_SECONDS = 60  # between two log lines about refused connections
ACCEPTED_AT_ONCE = 64  # connections that are accepted or refused before other work of the event loop has its turn
UNREAD_PAUSE = 0.005  # seconds between two reads of what follows responses, of all connections together
OTHER_DESCRIPTORS = 256  # kept for databases, files and worker processes
MAX_DESCRIPTORS = 65_536
_log = structlog.get_logger()


ADDRESS_SHARE = 4  # one address may open this part of all connections


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
        return cls(total, total // ADDRESS_SHARE, trusted)


def raise_descriptor_limit() -> None:
    """Raises the process's limit of open files to what the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Connection(socket.socket):
    """An accepted connection that reports when it is closed."""

    sender = ""
    closed: Callable[[_Connection], None] | None = None

    def close(self) -> None:
        """Closes the connection."""
        self._report()
        super().close()

    def give_way(self) -> None:
        """Shuts the connection down; the event loop then closes it."""
        self._report()
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def _report(self) -> None:
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed(self)


_Waiting = defaultdict[str, dict[int, _Connection]]


def _oldest_gives_way(waiting: dict[int, _Connection] | None) -> bool:
    """Ends the first of these connections; returns whether there is one."""
    if not waiting:
        return False
    next(iter(waiting.values())).give_way()
    return True


class Listener(socket.socket):
    """A listening socket that bounds its connections.

    A connection beyond a bound is closed before TLS and HTTP, unless an open one is closed in its place. At the bound
    of one address, this is the oldest connection of that address; at the total bound, the oldest one of the address
    with the most connections, if that has more than the new one's address. Only connections without a request in
    progress whose last request had no valid token are closed; at the total bound, if there are none, also those with a
    valid token. Idle and half-sent connections thus do not shut out other clients, not even of their own address.
    Connections of trusted proxies are never closed for others.
    """

    def __init__(self, listening: socket.socket, limits: ConnectionLimits) -> None:
        """Wraps a listening socket."""
        super().__init__(fileno=listening.detach())
        self._limits = limits
        self._trusted = [ip_network(text, strict=False) for text in limits.trusted if text != "*"]
        self._trusts_all = "*" in limits.trusted
        self._open: Counter[str] = Counter()
        self._connections: dict[int, _Connection] = {}  # by descriptor
        # By sender and descriptor: connections without a request in progress, the oldest first. `_authenticated` has
        # those whose last request had a valid token, and `_waiting` the others.
        self._waiting: _Waiting = defaultdict(dict)
        self._authenticated: _Waiting = defaultdict(dict)
        self.unread: set[object] = set()  # protocols whose client sends on after the response
        self._turn = 0  # connections accepted or refused since the event loop had its turn
        self._refused, self._logged = 0, float("-inf")
        # Closed for a moment to accept and refuse a connection when the process has no descriptor left.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accepts the next connection within the bounds, and closes those before it. Raises BlockingIOError."""
        while self._turn < ACCEPTED_AT_ONCE:
            self._turn += 1
            try:
                plain, address = super().accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                self._turn = 0
                raise
            except OSError as error:
                # The event loop would log each of these and try again at once.
                self._note(error.strerror or str(error))
                self._refuse_without_descriptor()
                continue
            sender = self._sender(address[0])
            if self._has_room(sender):
                return self._let_in(_Connection(fileno=plain.detach()), sender), address
            plain.close()
        self._turn = 0
        raise BlockingIOError

    def request_began(self, descriptor: int) -> None:
        """A request's head has arrived on this connection: it keeps its place until `request_ended`."""
        if (connection := self._connections.get(descriptor)) is not None:
            self._stop_waiting(connection)

    def request_ended(self, descriptor: int, authenticated: bool = False) -> None:
        """The connection waits for its next request, and may give way to others. authenticated: its token was valid."""
        if (connection := self._connections.get(descriptor)) is not None:
            self._stop_waiting(connection)
            (self._authenticated if authenticated else self._waiting)[connection.sender][descriptor] = connection

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

    def _has_room(self, sender: str) -> bool:
        """Returns whether a connection of this sender fits within the bounds; another one may give way for it."""
        if sender and self._open[sender] >= self._limits.of_address:
            self._note(f"{sender} has {self._limits.of_address} connections")
            return _oldest_gives_way(self._waiting.get(sender))
        if self._open.total() < self._limits.total:
            return True
        self._note(f"{self._limits.total} connections are open")
        return (
            self._largest_gives_way(self._waiting, sender)
            or _oldest_gives_way(self._waiting.get(sender) if sender else None)
            or self._largest_gives_way(self._authenticated, sender)
        )

    def _largest_gives_way(self, waiting: _Waiting, sender: str) -> bool:
        """Ends the oldest connection of the address with the most of these, if they are more than the sender has."""
        most = max((own for name, own in waiting.items() if name), key=len, default={})
        return len(most) > self._open[sender] and _oldest_gives_way(most)

    def _let_in(self, connection: _Connection, sender: str) -> _Connection:
        self._open[sender] += 1
        connection.sender, connection.closed = sender, self._forget
        self._connections[connection.fileno()] = connection
        self._waiting[sender][connection.fileno()] = connection
        return connection

    def _forget(self, connection: _Connection) -> None:
        sender, descriptor = connection.sender, connection.fileno()
        self._open[sender] -= 1
        if not self._open[sender]:
            del self._open[sender]
        del self._connections[descriptor]
        self._stop_waiting(connection)

    def _stop_waiting(self, connection: _Connection) -> None:
        for group in (self._waiting, self._authenticated):
            waiting = group.get(connection.sender, {})
            waiting.pop(connection.fileno(), None)
            if not waiting:
                group.pop(connection.sender, None)

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
    """uvicorn's HTTP/1.1 with deadlines for a request's head and for a client that does not read.

    Data after the response to a request, such as a refused body, is read slowly and dropped.
    """

    _head: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None
    _unsent: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, listener: Listener, **options: Any) -> None:
        """listener: accepted the connection. options: uvicorn's."""
        super().__init__(**options)
        self._listener, self._descriptor = listener, -1

    @classmethod
    def of(cls, listener: Listener) -> Any:
        """Returns what uvicorn calls to make the protocol of a connection."""
        return partial(cls, listener)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for a request."""
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's sockets
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request. Data after a response that begins no request has the same deadline."""
        super().data_received(data)
        if self._in_progress:
            _cancel(self._head)
            self._head = None
            self._listener.request_began(self._descriptor)
            if self.conn.their_state is h11.SEND_BODY:
                self.flow.pause_reading()  # until the application asks for more
            return
        if self._head is None:
            self._head = self.loop.call_later(HEAD_SECONDS, self.transport.abort)
        if self.cycle is not None and self.conn.their_state is h11.SEND_BODY:
            self._pause_reading()
        else:
            self._listener.unread.discard(self)

    @property
    def _in_progress(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _pause_reading(self) -> None:
        """Resumes reading after all other connections in this state had their turn."""
        self._listener.unread.add(self)
        self.flow.pause_reading()
        self._unread = self.loop.call_later(UNREAD_PAUSE * len(self._listener.unread), self.flow.resume_reading)

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the response's last bytes to be read."""
        # The rule that lets a caller in stores whom the token belongs to.
        authenticated = "principal" in self.cycle.scope.get("state", {})
        super().on_response_complete()
        _cancel(self._unsent)
        self._unsent = self.loop.call_later(KEEP_ALIVE_SECONDS + STALLED_SECONDS, self._abort_unsent)
        if not self._in_progress:
            self._listener.request_ended(self._descriptor, authenticated)

    def pause_writing(self) -> None:
        """The client reads more slowly than the server sends."""
        super().pause_writing()
        self._stalled = self.loop.call_later(STALLED_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read enough for sending to continue."""
        super().resume_writing()
        _cancel(self._stalled)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all deadlines."""
        for timer in (self._head, self._stalled, self._unsent, self._unread):
            _cancel(timer)
        self._listener.unread.discard(self)
        super().connection_lost(exc)

    def _abort_unsent(self) -> None:
        """Aborts a connection that the server has closed and whose client does not read the last bytes."""
        if self.transport.is_closing():
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
