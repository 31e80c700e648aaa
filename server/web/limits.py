"""Limits on the rate of requests: token buckets by token and by address.

Each server process counts for itself; behind several, a client gets as many times its rate. Used from one thread, the
event loop's.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from fastapi import Request

from server.settings import Settings
from shared.errors import TooManyRequests

CAPACITY = 20_000  # buckets of one kind, about 4 MiB; a forgotten bucket counts as full
Clock = Callable[[], float]


class RateLimit(StrEnum):
    """What the requests of a route are counted by."""

    CREDENTIAL = "token"
    ADDRESS = "address"
    REFUSALS = "refusals"  # requests with a wrong token, by address
    NONE = "none"


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


def address_of(request: Request) -> str:
    """Returns the caller's address."""
    return request.client.host if request.client else ""


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
