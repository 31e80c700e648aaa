"""The server's side of the scorer: sends requests in tokens and content hashes to a process, which it starts on demand
and restarts after a crash.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Literal

from server.inference.admission import Admission
from server.inference.errors import ScorerLate, ScorerOff, ScorerStopped
from server.inference.frames import (
    Batch,
    GenerateTask,
    ScoreTask,
    ServedAdapterRef,
    ServedBaseRef,
    TextToGenerate,
    TextToScore,
)
from server.inference.metrics import ScorerMeters
from server.inference.process import Inbox, Link
from server.settings import Settings
from server.web.state import AppState
from shared.errors import from_problem
from shared.generated_text import GeneratedToken

RESTART_SECONDS = 1.0  # from one start to the next, at least
Finish = Literal["stop", "length"]


class Scorer:
    """One server's scorer. Belongs to one event loop."""

    def __init__(self, settings: Settings, meters: ScorerMeters) -> None:
        self._settings, self._meters = settings, meters
        self._admission = Admission(settings.scorer_queue_tokens)
        self._numbers = count(1)
        self._starting = asyncio.Lock()
        self._started = -RESTART_SECONDS
        self._link: Link | None = None

    @property
    def pid(self) -> int | None:
        """The id of its process; None while none runs."""
        return None if self._link is None or self._link.ended else self._link.pid

    @property
    def waiting(self) -> int:
        """Number of tokens of unanswered requests."""
        return self._admission.waiting

    async def start(self) -> Link:
        """Returns the running process; starts one if there is none. Raises ScorerOff."""
        if self._settings.scorer == "off":
            raise ScorerOff
        async with self._starting:
            if self._link is None or self._link.ended:
                await asyncio.sleep(max(0.0, self._started + RESTART_SECONDS - time.monotonic()))
                self._started = time.monotonic()
                self._link = await Link.start(self._settings, self._hear)
                self._meters.started()
            return self._link

    async def close(self) -> None:
        """Stops the process, if one runs."""
        if self._link is not None:
            await self._link.close()
            self._meters.scorer_stopped()

    async def score(
        self,
        tenant: str,
        base: ServedBaseRef,
        adapters: Sequence[ServedAdapterRef],
        texts: Sequence[TextToScore],
    ) -> list[list[float]]:
        """Returns the log-probability of each answer of each text, nats.

        Raises TooManyRequests, ScorerBusy, ScorerOff, ScorerStopped, ScorerLate, or an error of the scorer.
        """
        tokens = sum(len(text.tokens) for text in texts)
        task = ScoreTask(id=next(self._numbers), base=base, adapters=tuple(adapters), texts=tuple(texts))
        async with self._conversation(tenant, tokens, task) as inbox:
            scores: list[list[float]] = (await self._next_message(inbox))["scores"]
            return scores

    async def generate(
        self, tenant: str, base: ServedBaseRef, adapters: Sequence[ServedAdapterRef], text: TextToGenerate
    ) -> AsyncGenerator[GeneratedToken | Finish, None]:
        """Yields the tokens that follow a text, then the reason for the end. Close the iterator to stop.

        Raises as `score` does.
        """
        task = GenerateTask(id=next(self._numbers), base=base, adapters=tuple(adapters), text=text)
        async with self._conversation(tenant, len(text.tokens) + text.most, task) as inbox:
            while True:
                message = await self._next_message(inbox)
                if "finish" in message:
                    finish: Finish = message["finish"]
                    yield finish
                    return
                del message["id"]
                yield GeneratedToken.model_validate(message)

    @asynccontextmanager
    async def _conversation(self, tenant: str, tokens: int, task: ScoreTask | GenerateTask) -> AsyncIterator[Inbox]:
        """Sends a task and yields the queue of its answers; cancels the task when the context ends."""
        with self._admission.admitted(tenant, tokens):
            link = await self.start()
            inbox = link.open(task.id)
            try:
                await link.send(task.model_dump(mode="json"))
                yield inbox
            finally:
                link.shut(task.id)
                await link.send({"id": task.id, "kind": "cancel"})

    async def _next_message(self, inbox: Inbox) -> dict[str, Any]:
        """Returns the next message. Raises ScorerLate, ScorerStopped, or the error that the message reports."""
        try:
            message = await asyncio.wait_for(inbox.get(), self._settings.scorer_seconds)
        except TimeoutError as error:
            raise ScorerLate from error
        if message is None:
            raise ScorerStopped
        if "problem" in message:
            raise from_problem(message["problem"])
        return message

    def _hear(self, message: dict[str, Any]) -> None:
        self._meters.ran(Batch.model_validate(message))


def make_scorer(state: AppState) -> Scorer:
    """Makes the scorer of one application."""
    return Scorer(state.settings, state.meters.part(ScorerMeters))
