"""Slows, pauses and resumes a job's training and transfers as the policy evaluator decides."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import structlog

from device_agent.engines import Engine
from device_agent.errors import PolicyForbids
from device_agent.policy.evaluator import PolicyEvaluator
from device_agent.policy.rules import Decision
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.job import Phase, Progress
from shared.program import ProgramManifest
from shared.rules import Rules
from shared.transport import ByteProgress
from shared.zo.trajectory import Limits

CHECK_SECONDS = 5.0  # between sensor readings while a job runs
WAIT_SECONDS = 10.0  # between sensor readings while it waits
PATIENCE_SECONDS = 1800.0  # of waiting before the job is released
WHY_LENGTH = 500  # maximum characters in a heartbeat

Answer = TypeVar("Answer")

_log = structlog.get_logger()


class Halted(Exception):
    """The daemon was asked to stop, or the lease has ended."""


class _TransferForbidden(Exception):
    """The rules forbid transfers on the current network."""


class PolicyGatedRun:
    """Training and transfers of one job, whenever the rules allow them."""

    def __init__(
        self,
        evaluator: PolicyEvaluator,
        rules: Rules,
        report: Callable[[Progress], None],
        stopped: Callable[[], bool],
        wait: Callable[[float], bool],
    ) -> None:
        """rules: the job's; the owner's apply as well. report: called with the progress. stopped: returns
        whether to halt.

        wait: sleeps up to that many seconds; returns early if the daemon is asked to stop.
        """
        self.rules = evaluator.rules.strictest(rules)
        self._evaluator, self._stopped, self._wait, self._send_progress = evaluator, stopped, wait, report
        self._progress = Progress(phase="downloading")
        self._limits = Limits()
        self._slow_reason: str | None = None
        self._pause_reason: str | None = None
        self._checked_at = self._counted_at = 0.0
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase = self._progress.phase
        self._phase_began = time.monotonic()

    def phase_seconds(self) -> dict[Phase, float]:
        """Returns the seconds since this object was made, by phase; the current phase counts until now."""
        self._enter(self._phase)
        return {phase: round(seconds, 3) for phase, seconds in self._seconds.items()}

    def _enter(self, phase: Phase) -> None:
        """Ends the current phase and begins another."""
        now = time.monotonic()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._phase_began
        self._phase, self._phase_began = phase, now

    def report(self, progress: Progress) -> None:
        """Reports progress, with the reason if the rules slow the run down."""
        self._enter(progress.phase)
        self._progress = progress
        why = self._slow_reason if progress.phase == "training" else None
        self._send_progress(progress if why is None else progress.model_copy(update={"why": why[:WHY_LENGTH]}))

    def train(self, engine: Engine, run: RunDirectory, manifest: ProgramManifest) -> TrainerMessage:
        """Trains a run to its end, across pauses; returns the engine's last message.

        Raises PolicyForbids if a pause exceeds PATIENCE_SECONDS or is known to, Halted, and the engine's errors.
        """
        while True:
            self._await(lambda: self._evaluator.training(self.rules, manifest, manifest.training_bytes))
            self._begin(run)
            try:
                message = engine.train(run, self.report, lambda: self._stop(run, manifest))
            finally:
                self._count()
            if not message.stopped or self._pause_reason is None or self._stopped():
                return message
            _log.info("training paused; its memory is free", why=self._pause_reason)

    def transfer(self, move: Callable[[ByteProgress], Answer]) -> Answer:
        """Calls `move` with a progress callback; calls it again after a pause that the rules require.

        Raises PolicyForbids and Halted like `train`, and what `move` raises.
        """
        while True:
            self._await(lambda: self._evaluator.transfer(self.rules))
            self._checked_at = time.monotonic()
            try:
                return move(self._check_transfer)
            except _TransferForbidden:
                _log.info("transfer paused")

    def _await(self, decide: Callable[[], Decision]) -> None:
        began = time.monotonic()
        while (decision := decide()).action == "wait":
            self._enter("waiting")
            why = decision.why or "the rules do not allow it now"
            self._send_progress(self._progress.model_copy(update={"phase": "waiting", "why": why[:WHY_LENGTH]}))
            left = PATIENCE_SECONDS - (time.monotonic() - began)
            if left <= 0 or self._evaluator.seconds_until(decision) > left:
                raise PolicyForbids(f"{why}; the job is released, the run is kept")
            self._wait(WAIT_SECONDS)
            if self._stopped():
                raise Halted
        self._enter(self._progress.phase)

    def _begin(self, run: RunDirectory) -> None:
        self._pause_reason, self._limits = None, run.limits()
        self._checked_at, self._counted_at = 0.0, time.monotonic()

    def _stop(self, run: RunDirectory, manifest: ProgramManifest) -> bool:
        if self._stopped():
            return True
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._count()
            self._apply(run, self._evaluator.training(self.rules, manifest))
            self._checked_at = time.monotonic()
        return self._pause_reason is not None

    def _apply(self, run: RunDirectory, decision: Decision) -> None:
        if decision.action == "wait":
            self._pause_reason = decision.why or "the rules do not allow it now"
            return
        self._slow_reason = decision.why if decision.action == "slow" else None
        if not decision.limits.same(self._limits):
            run.limit(decision.limits)
            self._limits = decision.limits
            _log.info("training pace changed", rest=decision.rest, length=decision.max_length, why=decision.why)

    def _count(self) -> None:
        """Adds the time since the last call to the day's training minutes."""
        now = time.monotonic()
        self._evaluator.spend(now - self._counted_at)
        self._counted_at = now

    def _check_transfer(self, _arrived: int, _size: int) -> None:
        if self._stopped():
            raise Halted
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._send_progress(self._progress)  # received bytes count as progress
            if self._evaluator.transfer(self.rules).action == "wait":
                raise _TransferForbidden
