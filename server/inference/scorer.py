"""The scorer as the server sees it: requests in tokens and content addresses, and a process that is started when it is
needed and restarted after it died.
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
    GeneratedToken,
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
        """Of its process; None while there is none."""
        return None if self._link is None or self._link.ended else self._link.pid

    @property
    def waiting(self) -> int:
        """Tokens of the requests that are not answered yet."""
        return self._admission.waiting

    async def start(self) -> Link:
        """The process that lives, started if there is none. Raises ScorerOff."""
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
        """Ends the process, if there is one."""
        if self._link is not None:
            await self._link.close()
            self._meters.gone()

    async def score(
        self,
        tenant: str,
        base: ServedBaseRef,
        adapters: Sequence[ServedAdapterRef],
        texts: Sequence[TextToScore],
    ) -> list[list[float]]:
        """The log-probability of each answer of each text, nats.

        Raises TooManyRequests, ScorerBusy, ScorerOff, ScorerStopped, ScorerLate, and what the scorer found wrong.
        """
        tokens = sum(len(text.tokens) for text in texts)
        task = ScoreTask(id=next(self._numbers), base=base, adapters=tuple(adapters), texts=tuple(texts))
        async with self._conversation(tenant, tokens, task) as inbox:
            scores: list[list[float]] = (await self._heard(inbox))["scores"]
            return scores

    async def generate(
        self, tenant: str, base: ServedBaseRef, adapters: Sequence[ServedAdapterRef], text: TextToGenerate
    ) -> AsyncGenerator[GeneratedToken | Finish, None]:
        """The tokens that follow a text as they are found, then why there are no more. Raises as `score` does.

        Whoever has enough closes the iterator.
        """
        task = GenerateTask(id=next(self._numbers), base=base, adapters=tuple(adapters), text=text)
        async with self._conversation(tenant, len(text.tokens) + text.most, task) as inbox:
            while True:
                message = await self._heard(inbox)
                if "finish" in message:
                    finish: Finish = message["finish"]
                    yield finish
                    return
                del message["id"]
                yield GeneratedToken.model_validate(message)

    @asynccontextmanager
    async def _conversation(self, tenant: str, tokens: int, task: ScoreTask | GenerateTask) -> AsyncIterator[Inbox]:
        """What the scorer says to a task, which it lets be once nobody listens."""
        with self._admission.admitted(tenant, tokens):
            link = await self.start()
            inbox = link.open(task.id)
            try:
                await link.send(task.model_dump(mode="json"))
                yield inbox
            finally:
                link.shut(task.id)
                await link.send({"id": task.id, "kind": "cancel"})

    async def _heard(self, inbox: Inbox) -> dict[str, Any]:
        """The next message. Raises ScorerLate, ScorerStopped, or the problem that it is."""
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
