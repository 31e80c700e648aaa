"""Limits on what clients may use, so that none of them can stop the server: requests, connections, and their time.

`Limits` has token buckets of requests by token and by address. Each server process counts for itself; behind several, a
client gets as many times its rate. Used from one thread, the event loop's.

`Listener` bounds connections in all and of one address; at the bound in all, the address with the most connections
makes room for others. `DeadlineProtocol` closes those whose request line and headers do not arrive in time, and those
whose client does not read, and reads slowly what follows a response. Bodies have a deadline in
`server.web.middleware`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
import socket
import time
from collections import Counter, OrderedDict, defaultdict
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
from shared.errors import TooManyRequests

CAPACITY = 20_000  # buckets of one kind, about 4 MiB; a forgotten bucket counts as full
Clock = Callable[[], float]
HEAD_SECONDS = 20  # for a request's line and headers, from the connection or from their first byte
STALLED_SECONDS = 120  # that a client may leave a response unread
KEEP_ALIVE_SECONDS = 30  # between requests; longer than the pause between a device's heartbeats
LOG_SECONDS = 60  # between two log lines about refused connections
ACCEPTED_AT_ONCE = 64  # connections that are accepted or refused before other work of the event loop has its turn
UNREAD_PAUSE = 0.005  # seconds between two reads of what follows responses, of all connections together
OTHER_DESCRIPTORS = 256  # kept for databases, files and worker processes
MOST_DESCRIPTORS = 65_536
_log = structlog.get_logger()


class Buckets:
    """One token bucket for each key; beyond the capacity, the least recently used are forgotten."""

    def __init__(self, rate: float, burst: int, clock: Clock = time.monotonic, capacity: int = CAPACITY) -> None:
        """rate: requests a second in the long run. burst: requests at once after a pause."""
        self._rate, self._burst, self._clock, self._capacity = rate, burst, clock, capacity
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()  # requests left, and as of when

    def __contains__(self, key: str) -> bool:
        return key in self._levels

    def __len__(self) -> int:
        return len(self._levels)

    def _left(self, key: str, now: float) -> float:
        left, since = self._levels.get(key, (float(self._burst), now))
        return min(float(self._burst), left + (now - since) * self._rate)

    def wait(self, key: str) -> float:
        """Returns the seconds until a request may be made; 0: now. Takes nothing."""
        return max(0.0, (1 - self._left(key, self._clock())) / self._rate)

    def take(self, key: str) -> float:
        """Takes one request and returns 0, or returns the seconds until one may be made."""
        now = self._clock()
        left = self._left(key, now)
        taken = left >= 1
        self._levels[key] = (left - 1 if taken else left, now)
        self._levels.move_to_end(key)
        if len(self._levels) > self._capacity:
            self._levels.popitem(last=False)
        return 0.0 if taken else (1 - left) / self._rate

    def forget(self, key: str) -> None:
        """Drops a key's bucket."""
        self._levels.pop(key, None)


def place_of(address: str) -> str:
    """Returns what counts as one sender: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


class Limits:
    """The limits of one server process."""

    def __init__(self, settings: Settings, clock: Clock = time.monotonic) -> None:
        self._tokens = Buckets(settings.token_rate, settings.token_burst, clock)
        self._addresses = Buckets(settings.address_rate, settings.address_burst, clock)
        self._refusals = Buckets(settings.refusal_rate, settings.refusal_burst, clock)

    def anonymous(self, address: str) -> None:
        """Counts a request without a token. Raises TooManyRequests."""
        _check("address", self._addresses.take(place_of(address)))

    def before(self, digest: str, address: str) -> None:
        """Counts a request whose token is not looked up yet. Raises TooManyRequests.

        From an address with too many rejected tokens only tokens that were valid before are looked up: guessing stops,
        and other clients behind the same address go on.
        """
        if digest in self._tokens:
            _check("token", self._tokens.take(digest))
        else:
            _check("refusals", self._refusals.wait(place_of(address)))

    def good(self, digest: str) -> None:
        """Records that a token is valid."""
        if digest not in self._tokens:
            self._tokens.take(digest)

    def refused(self, digest: str, address: str) -> None:
        """Records that a token was rejected, which counts against the address."""
        self._tokens.forget(digest)
        self._refusals.take(place_of(address))


def _check(limit: str, seconds: float) -> None:
    if seconds > 0:
        raise TooManyRequests(
            f"too many requests; the next is taken in {seconds:.1f} s",
            limit=limit,
            retry_after_seconds=round(seconds, 3),
        )


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

    sender = ""
    closed: Callable[[_Connection], None] | None = None

    def close(self) -> None:
        """Closes the connection."""
        self._report()
        super().close()

    def give_way(self) -> None:
        """Ends the connection; the event loop reads that end and closes it."""
        self._report()
        with suppress(OSError):
            self.shutdown(socket.SHUT_RDWR)

    def _report(self) -> None:
        if self.closed is not None:
            closed, self.closed = self.closed, None
            closed(self)


class Listener(socket.socket):
    """A listening socket that bounds its connections.

    Connections beyond a bound are closed before TLS and HTTP. At the bound in all, however, the address with the most
    connections that have no request in progress loses the oldest of them to a new one of an address that has fewer.
    Idle and half-sent connections of some addresses thus do not shut out others. Trusted proxies' connections do not
    give way.
    """

    def __init__(self, listening: socket.socket, limits: ConnectionLimits) -> None:
        """Takes a listening socket over."""
        super().__init__(fileno=listening.detach())
        self._limits = limits
        self._trusted = [ip_network(text, strict=False) for text in limits.trusted if text != "*"]
        self._trusts_all = "*" in limits.trusted
        self._open: Counter[str] = Counter()
        self._connections: dict[int, _Connection] = {}  # by descriptor
        # By sender and descriptor: connections without a request in progress, the oldest first.
        self._waiting: defaultdict[str, dict[int, _Connection]] = defaultdict(dict)
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

    def request_ended(self, descriptor: int) -> None:
        """The connection waits for its next request, and may give way to others."""
        if (connection := self._connections.get(descriptor)) is not None:
            self._waiting[connection.sender][descriptor] = connection

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
            return False
        if self._open.total() < self._limits.total:
            return True
        self._note(f"{self._limits.total} connections are open")
        most = max((waiting for name, waiting in self._waiting.items() if name), key=len, default={})
        if len(most) <= self._open[sender]:
            return False
        next(iter(most.values())).give_way()
        return True

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
        waiting = self._waiting.get(connection.sender, {})
        waiting.pop(connection.fileno(), None)
        if not waiting:
            self._waiting.pop(connection.sender, None)

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

    What a client sends on after the response to its request, such as a refused body, is read slowly and dropped.
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
        self._descriptor = transport.get_extra_info("socket").fileno()
        self._head = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Reads a part of a request. What follows a response and begins no request has the same deadline."""
        super().data_received(data)
        if self._in_progress:
            _cancel(self._head)
            self._head = None
            self._listener.request_began(self._descriptor)
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
        """Reads on when all other connections in this state have had their turn."""
        self._listener.unread.add(self)
        self.flow.pause_reading()
        self._unread = self.loop.call_later(UNREAD_PAUSE * len(self._listener.unread), self.flow.resume_reading)

    def on_response_complete(self) -> None:
        """Waits for the next request, and for the response's last bytes to be read."""
        super().on_response_complete()
        _cancel(self._unsent)
        self._unsent = self.loop.call_later(KEEP_ALIVE_SECONDS + STALLED_SECONDS, self._abort_unsent)
        if not self._in_progress:
            self._listener.request_ended(self._descriptor)

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
        for timer in (self._head, self._stalled, self._unsent, self._unread):
            _cancel(timer)
        self._listener.unread.discard(self)
        super().connection_lost(exc)

    def _abort_unsent(self) -> None:
        """Ends a connection that was closed by the server, whose client does not read its last bytes."""
        if self.transport.is_closing():
            self.transport.abort()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
