"""What the scorer does next: a batch of texts to score, then a token for each text that grows, and again.

Knows no sockets and no tenants.
"""

from __future__ import annotations

from typing import Any

from server.scoring.frames import GenerateTask, ScoreTask
from server.scoring.growths import Growths
from server.scoring.holdings import Holdings
from server.scoring.scores import Scores
from server.scoring.workroom import Send, Workroom


class Scheduler:
    """The work of one scorer. Used by one thread."""

    def __init__(self, holdings: Holdings, batch_tokens: int, cache_limit: int, send: Send) -> None:
        """cache_limit: bytes of the keys and values of all texts that grow. send: tells the server something."""
        room = Workroom(holdings, send)
        self._scores = Scores(room, batch_tokens)
        self._growths = Growths(room, batch_tokens, cache_limit)
        room.texts = lambda: (self._scores.waiting + self._growths.waiting, self._growths.growing)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._scores.waiting or self._growths.waiting or self._growths.growing)

    def hear(self, message: dict[str, Any]) -> None:
        """Takes a task, or a cancellation."""
        if message["kind"] == "cancel":
            self._scores.forget(message["id"])
            self._growths.forget(message["id"])
        elif message["kind"] == "score":
            self._scores.add(ScoreTask.model_validate(message))
        else:
            self._growths.add(GenerateTask.model_validate(message))

    def turn(self) -> None:
        """One round of batches."""
        self._scores.turn()
        # What waits to be scored for want of memory waits for those that grow, not for all that come after.
        self._growths.turn(admit=not self._scores.stuck)
