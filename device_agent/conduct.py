"""One job under the rules: its training is slowed, stopped and begun again, its transfers wait, as the guard says.

Knows no HTTP, no lease and no sensor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from device_agent.admission import needed_bytes
from device_agent.engines import Engine
from device_agent.errors import NotNow
from device_agent.guard import Guard
from device_agent.journal import RunDirectory
from device_agent.messages import Message
from device_agent.policy import Decision
from shared.job import Progress
from shared.program import ProgramManifest
from shared.rules import Rules
from shared.trajectory import Limits
from shared.transport import ByteProgress

LOOK_SECONDS = 5.0  # between looks at the sensors while a job runs
WAIT_SECONDS = 10.0  # between looks while it waits
PATIENCE_SECONDS = 1800.0  # of waiting; then somebody else may have the job
WHY_LENGTH = 500  # characters that a heartbeat takes

Answer = TypeVar("Answer")

_log = structlog.get_logger()


class Halted(Exception):
    """The daemon is asked to stop, or there is no lease to work for any more."""


class _LinkClosed(Exception):
    """The network in use became one that the rules keep transfers off."""


class Conduct:
    """A job's training and transfers while the rules allow them."""

    def __init__(
        self,
        guard: Guard,
        rules: Rules,
        tell: Callable[[Progress], None],
        over: Callable[[], bool],
        wait: Callable[[float], bool],
    ) -> None:
        """rules: the job's; the owner's hold as well. tell: told the progress. over: whether to halt.

        wait: sleeps that many seconds, less if the daemon is asked to stop.
        """
        self.rules = guard.rules.strictest(rules)
        self._guard, self._over, self._wait, self._tell_on = guard, over, wait, tell
        self._progress = Progress(phase="downloading")
        self._limits = Limits()
        self._slowly: str | None = None  # why, in words
        self._held: str | None = None
        self._looked = self._counted = 0.0

    def tell(self, progress: Progress) -> None:
        """Tells of progress, and why it is slow if the rules made it so."""
        self._progress = progress
        why = self._slowly if progress.phase == "training" else None
        self._tell_on(progress if why is None else progress.model_copy(update={"why": why[:WHY_LENGTH]}))

    def train(self, engine: Engine, run: RunDirectory, manifest: ProgramManifest) -> Message:
        """Trains a run to its end, over as many stops as the rules ask for; returns the engine's last message.

        Raises NotNow when waiting has lasted PATIENCE_SECONDS or is known to, Halted, and what the engine raises.
        """
        while True:
            self._await(lambda: self._guard.training(self.rules, manifest, needed_bytes(manifest)))
            self._begin(run)
            try:
                message = engine.train(run, self.tell, lambda: self._stop(run, manifest))
            finally:
                self._count()
            if not message.stopped or self._held is None or self._over():
                return message
            _log.info("training waits; its memory is free", why=self._held)

    def transfer(self, move: Callable[[ByteProgress], Answer]) -> Answer:
        """`move`, which is given whom to tell of its bytes; begun again after a pause on a network the rules forbid.

        Raises NotNow as `train` does, Halted, and what `move` raises.
        """
        while True:
            self._await(lambda: self._guard.transfer(self.rules))
            self._looked = time.monotonic()
            try:
                return move(self._moving)
            except _LinkClosed:
                _log.info("a transfer stops and goes on later")

    def _await(self, ask: Callable[[], Decision]) -> None:
        began = time.monotonic()
        while (decision := ask()).action == "wait":
            why = decision.why or "the rules do not allow it now"
            self._tell_on(self._progress.model_copy(update={"phase": "waiting", "why": why[:WHY_LENGTH]}))
            left = PATIENCE_SECONDS - (time.monotonic() - began)
            if left <= 0 or self._guard.seconds_until(decision) > left:
                raise NotNow(f"{why}; the job is given back, the run is kept")
            self._wait(WAIT_SECONDS)
            if self._over():
                raise Halted

    def _begin(self, run: RunDirectory) -> None:
        self._held, self._limits = None, run.limits()
        self._looked, self._counted = 0.0, time.monotonic()

    def _stop(self, run: RunDirectory, manifest: ProgramManifest) -> bool:
        if self._over():
            return True
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._count()
            self._look(run, self._guard.training(self.rules, manifest))
            self._looked = time.monotonic()
        return self._held is not None

    def _look(self, run: RunDirectory, decision: Decision) -> None:
        if decision.action == "wait":
            self._held = decision.why or "the rules do not allow it now"
            return
        self._slowly = decision.why if decision.action == "slow" else None
        if not decision.limits.same(self._limits):
            run.limit(decision.limits)
            self._limits = decision.limits
            _log.info("training at another pace", rest=decision.rest, length=decision.max_length, why=decision.why)

    def _count(self) -> None:
        """Counts the time since the last count as trained."""
        now = time.monotonic()
        self._guard.spend(now - self._counted)
        self._counted = now

    def _moving(self, _arrived: int, _size: int) -> None:
        if self._over():
            raise Halted
        if time.monotonic() - self._looked >= LOOK_SECONDS:
            self._looked = time.monotonic()
            self._tell_on(self._progress)  # bytes came, which is progress
            if self._guard.transfer(self.rules).action == "wait":
                raise _LinkClosed
