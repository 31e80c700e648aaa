"""What lets a job run: its lease, kept alive by heartbeats, and the policy, which slows, pauses and resumes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

import structlog

from device_agent.android.adb import PhoneUnreachable
from device_agent.errors import PolicyForbids, Stopped
from device_agent.executors.process import Launcher
from device_agent.policy.evaluator import PolicyEvaluator
from device_agent.policy.rules import MAX_WHY, Decision
from device_agent.protocol.client import Backoff, DeviceClient
from device_agent.training.run import train_run
from device_agent.training.run_directory import RunDirectory
from shared.errors import Gone, MobizoError, NotFound, Unauthorized
from shared.job import Progress
from shared.program import ProgramManifest
from shared.protocol import Lease
from shared.result import Phase, Result
from shared.rules import Rules
from shared.transport import ByteProgress
from shared.zo.trajectory import parse_trajectory

LONGEST_RETRY_SECONDS = 60.0  # between attempts while the server does not answer
JOIN_SECONDS = 2.0
_log = structlog.get_logger()
CHECK_SECONDS = 5.0  # between sensor readings while a job runs
WAIT_SECONDS = 10.0  # between sensor readings while it waits
PHONE_SECONDS, LONGEST_PHONE_SECONDS = 1.0, 30.0  # between two attempts to reach a lost phone
PATIENCE_SECONDS = 1800.0  # of waiting before the job is released
Answer = TypeVar("Answer")
Item = TypeVar("Item")


# Seconds between heartbeats. The longest keeps the shown progress current and notices a cancelled job soon; the
# shortest prevents a flood of requests if the server states an invalid expiry.
SHORTEST_SECONDS, LONGEST_SECONDS = 0.2, 5.0


class LeaseHeartbeat:
    """Sends heartbeats at a quarter of the lease's duration or more often; an unreachable server does not interrupt
    the run.

    ended: why the job must stop: its lease has ended, the server refuses this device, or the job was cancelled.
    """

    def __init__(self, client: DeviceClient, lease: Lease) -> None:
        self._client, self._lease = client, lease
        # The server's clock, because this device's clock may be hours off.
        self._interval = interval(client.clock.seconds_until(lease.expires_at))
        self._retry = Backoff(self._interval, LONGEST_RETRY_SECONDS)
        self._unreachable = False
        self._progress = Progress(phase="downloading")
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self.ended: Literal["lost", "refused", "cancelled"] | None = None

    def __enter__(self) -> LeaseHeartbeat:
        self._thread.start()
        return self

    def __exit__(self, *exception_info: object) -> None:
        self._done.set()
        self._thread.join(JOIN_SECONDS)

    def report(self, progress: Progress) -> None:
        """Sets the progress that the next heartbeat reports."""
        self._progress = progress

    def _run(self) -> None:
        while True:
            pause = self._send()
            if self.ended or self._done.wait(pause):
                return

    def _send(self) -> float:
        """Sends one heartbeat; returns the seconds until the next one."""
        try:
            state = self._client.heartbeat(self._lease.id, self._progress)
        except Unauthorized as error:
            _log.warning("the server refuses this device", detail=error.detail)
            self.ended = "refused"
        except (Gone, NotFound) as error:
            _log.warning("lease lost", job=self._lease.job.id, detail=error.detail)
            self.ended = "lost"
        except MobizoError as error:
            # Log an unreachable server once, not at every attempt.
            if not self._unreachable:
                _log.warning("heartbeat failed; training continues", detail=error.detail)
            self._unreachable = True
            return self._retry.pause()
        else:
            if self._unreachable:
                _log.info("the server answers again")
            self._unreachable = False
            self._interval = interval(self._client.clock.seconds_until(state.expires_at))
            self._retry = Backoff(self._interval, LONGEST_RETRY_SECONDS)
            if state.stop:
                self.ended = "cancelled"
        return self._interval


def interval(remaining_seconds: float) -> float:
    """Returns the seconds between heartbeats of a lease with `remaining_seconds`: a quarter of them, within bounds."""
    return min(max(remaining_seconds / 4, SHORTEST_SECONDS), LONGEST_SECONDS)


class _TransferForbidden(Exception):
    """The rules forbid transfers now."""


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
        self.wait, self._evaluator, self._stopped, self._send_progress = wait, evaluator, stopped, report
        self._progress = Progress(phase="downloading")
        self._rest = 0.0  # seconds of pause for each second of a step
        self._slow_reason: str | None = None
        self._pause_reason: str | None = None
        self._checked_at = self._counted_at = 0.0
        self._seconds: dict[Phase, float] = {}
        self._phase: Phase = self._progress.phase
        self._phase_began = time.monotonic()

    def check(self) -> None:
        """Raises Stopped if the job must stop."""
        if self._stopped():
            raise Stopped

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
        self._send_progress(progress if why is None else progress.model_copy(update={"why": why}))

    def train(
        self, launcher: Launcher, run: RunDirectory, manifest: ProgramManifest, loaded: Callable[[], None]
    ) -> Result:
        """Trains a run to its result, across pauses and lost phones. loaded: see `train_run`.

        Raises PolicyForbids if a pause exceeds PATIENCE_SECONDS or is known to, Stopped, and what `train_run` raises.
        """
        lost_at: float | None = None  # when the phone was lost
        pauses = Backoff(PHONE_SECONDS, LONGEST_PHONE_SECONDS)
        while True:
            self._await(lambda: self._evaluator.training(self.rules, manifest.training_bytes))
            self._begin_training()
            steps = recorded_steps(run)
            try:
                return train_run(run, launcher, self.report, self._stop, lambda: self._rest, loaded)
            except Stopped:
                if self._pause_reason is None or self._stopped():
                    raise
                _log.info("training paused; its memory is free", why=self._pause_reason)
            except PhoneUnreachable as error:
                if recorded_steps(run) == 0:
                    raise
                if recorded_steps(run) > steps:
                    lost_at = None
                    pauses.reset()
                lost_at = time.monotonic() if lost_at is None else lost_at
                why = str(type(error).__doc__)
                self._report_waiting(why)
                if time.monotonic() - lost_at > PATIENCE_SECONDS:
                    raise PolicyForbids(f"{why}; the job is released, the run is kept") from None
                self.wait(pauses.pause())
                self.check()
            finally:
                self._count()

    def pace(self, items: Iterable[Item], progress: Progress) -> Iterator[Item]:
        """Yields the items whenever the rules allow computing, and reports `progress` with each.

        The time between them counts as training minutes. Raises PolicyForbids and Stopped like `train`.
        """
        for item in items:
            self._await(lambda: self._evaluator.training(self.rules))
            self.check()
            self.report(progress)
            self._counted_at = time.monotonic()
            yield item
            self._count()

    def transfer(self, move: Callable[[ByteProgress], Answer], *, download: bool = False) -> Answer:
        """Calls `move` with a progress callback; calls it again after a pause that the rules require.

        download: which the rules on power and heat restrict too. Raises PolicyForbids and Stopped like `train`, and
        what `move` raises.
        """
        decide = self._evaluator.download if download else self._evaluator.transfer
        while True:
            self._await(lambda: decide(self.rules))
            self._checked_at = time.monotonic()
            try:
                return move(lambda _arrived, _size: self._check_transfer(decide))
            except _TransferForbidden:
                _log.info("transfer paused")

    def _report_waiting(self, why: str) -> None:
        self._enter("waiting")
        self._send_progress(self._progress.model_copy(update={"phase": "waiting", "why": why[:MAX_WHY]}))

    def _await(self, decide: Callable[[], Decision]) -> None:
        began = time.monotonic()
        while (decision := decide()).action == "wait":
            self._report_waiting(decision.why or "the rules do not allow it now")
            remaining_seconds = PATIENCE_SECONDS - (time.monotonic() - began)
            if remaining_seconds <= 0 or self._evaluator.seconds_until(decision) > remaining_seconds:
                raise PolicyForbids(f"{decision.local_why}; the job is released, the run is kept")
            self.wait(WAIT_SECONDS)
            self.check()
        self._enter(self._progress.phase)

    def _begin_training(self) -> None:
        """Forgets the reason of the last pause; the next call of `_stop` reads the sensors."""
        self._pause_reason = None
        self._checked_at, self._counted_at = 0.0, time.monotonic()

    def _stop(self) -> bool:
        if self._stopped():
            return True
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._count()
            self._apply(self._evaluator.training(self.rules))
            self._checked_at = time.monotonic()
        return self._pause_reason is not None

    def _apply(self, decision: Decision) -> None:
        if decision.action == "wait":
            self._pause_reason = decision.local_why
            return
        self._slow_reason = decision.why if decision.action == "slow" else None
        if (decision.rest > 0) != (self._rest > 0):
            _log.info("training pace changed", rest=decision.rest, why=decision.why)
        self._rest = decision.rest

    def _count(self) -> None:
        """Adds the time since the last call to the day's training minutes."""
        now = time.monotonic()
        self._evaluator.spend(now - self._counted_at)
        self._counted_at = now

    def _check_transfer(self, decide: Callable[[Rules], Decision]) -> None:
        self.check()
        if time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self._checked_at = time.monotonic()
            self._send_progress(self._progress)  # received bytes count as progress
            if decide(self.rules).action == "wait":
                raise _TransferForbidden


def recorded_steps(run: RunDirectory) -> int:
    """Returns the number of steps in a run's trajectory; 0 for a run that has not begun."""
    trajectory = parse_trajectory(run.trajectory.read_bytes())[0] if run.trajectory.exists() else None
    return 0 if trajectory is None else trajectory.steps
