"""How many requests a token or an address may make: token buckets in this process.

Each server process counts for itself; behind several, a client gets as many times its rate. Used from one thread, the
event loop's.
"""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

from server.settings import Settings
from shared.errors import TooManyRequests

CAPACITY = 20_000  # buckets of one kind, about 4 MiB; a forgotten bucket is a full one
Clock = Callable[[], float]


class Buckets:
    """One token bucket for each key; of too many, those not asked for longest are forgotten."""

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
        """Seconds until a request may be made; 0: now. Takes nothing."""
        return max(0.0, (1 - self._left(key, self._clock())) / self._rate)

    def take(self, key: str) -> float:
        """Takes one request if there is one; else the seconds until there is."""
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
    """What counts as one sender: an IPv4 address, or the /64 that one IPv6 host can have all of."""
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
        """A request without a token. Raises TooManyRequests."""
        _check("address", self._addresses.take(place_of(address)))

    def before(self, digest: str, address: str) -> None:
        """A request with a token that is yet to be looked up. Raises TooManyRequests.

        From an address that was refused too often only tokens that were good before are looked up: guessing stops,
        and the others behind the same address go on.
        """
        if digest in self._tokens:
            _check("token", self._tokens.take(digest))
        else:
            _check("refusals", self._refusals.wait(place_of(address)))

    def good(self, digest: str) -> None:
        """The token was found good."""
        if digest not in self._tokens:
            self._tokens.take(digest)

    def refused(self, digest: str, address: str) -> None:
        """The token was not: counts against the address."""
        self._tokens.forget(digest)
        self._refusals.take(place_of(address))


def _check(limit: str, seconds: float) -> None:
    if seconds > 0:
        raise TooManyRequests(
            f"too many requests; the next is taken in {seconds:.1f} s",
            limit=limit,
            retry_after_seconds=round(seconds, 3),
        )
