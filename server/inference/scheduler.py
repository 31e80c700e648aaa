"""The scorer's loop: alternates one batch of texts to score with one token for each text being generated."""

from __future__ import annotations

from typing import Any

from server.inference.frames import GenerateTask, ScoreTask
from server.inference.generation import Generations
from server.inference.model_cache import ModelCache
from server.inference.score_batches import Scores
from server.inference.worker_state import Send, WorkerState


class Scheduler:
    """The work of one scorer. Not thread-safe."""

    def __init__(self, model_cache: ModelCache, batch_tokens: int, cache_limit: int, send: Send) -> None:
        """cache_limit: bytes of the keys and values of all generated texts. send: sends a message to the server."""
        worker = WorkerState(model_cache, send)
        self._scores = Scores(worker, batch_tokens)
        self._generations = Generations(worker, batch_tokens, cache_limit)
        worker.texts = lambda: (self._scores.waiting + self._generations.waiting, self._generations.generating)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._scores.waiting or self._generations.waiting or self._generations.generating)

    def receive(self, message: dict[str, Any]) -> None:
        """Accepts a task or a cancellation."""
        if message["kind"] == "cancel":
            self._scores.forget(message["id"])
            self._generations.forget(message["id"])
        elif message["kind"] == "score":
            self._scores.add(ScoreTask.model_validate(message))
        else:
            self._generations.add(GenerateTask.model_validate(message))

    def step(self) -> None:
        """Runs one batch of each kind."""
        self._scores.step()
        # If scoring waits for memory, no new text is admitted before the running ones have ended.
        self._generations.step(admit=not self._scores.stuck)
