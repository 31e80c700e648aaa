"""Pauses that grow while something stays away. Knows nothing of what is waited for."""

from __future__ import annotations

import random


class Backoff:
    """Seconds to wait before the next try: doubled each time, jittered so that a fleet does not come back in step."""

    def __init__(self, shortest: float, longest: float) -> None:
        self._shortest, self._longest = shortest, longest
        self._next = shortest

    def pause(self) -> float:
        """The next pause, between half of its nominal length and all of it."""
        pause, self._next = self._next, min(self._next * 2, self._longest)
        return jittered(pause)

    def reset(self) -> None:
        """What was away is back: the next pause is the shortest again."""
        self._next = self._shortest


def jittered(seconds: float) -> float:
    """Between half of `seconds` and all of it."""
    return random.uniform(0.5, 1) * seconds
