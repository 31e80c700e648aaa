"""Limits the tokens that wait for the scorer: a total, and half of it for one tenant.

Used from one thread, the event loop's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from server.inference.errors import ScorerBusy
from shared.errors import TooManyRequests

RETRY_SECONDS = 2.0


class Admission:
    """The tokens of one server's unanswered requests, in total and by tenant."""

    def __init__(self, limit: int) -> None:
        """limit: tokens."""
        self._limit = limit
        self._of: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Tokens of all requests that are not answered yet."""
        return self._of.total()

    @contextmanager
    def admitted(self, tenant: str, tokens: int) -> Iterator[None]:
        """Counts a request while the context lasts; a lone one always comes in.

        Raises TooManyRequests if the tenant has its share, ScorerBusy if nobody may ask for more.
        """
        if self._of[tenant] and self._of[tenant] + tokens > self._limit // 2:
            raise TooManyRequests(
                "the tenant's texts that wait to be scored are as many as one tenant may have; wait for some of them",
                limit="scoring",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self._of and self.waiting + tokens > self._limit:
            raise ScorerBusy
        self._of[tenant] += tokens
        try:
            yield
        finally:
            self._of[tenant] -= tokens
            self._of += Counter()  # forgets tenants without any
