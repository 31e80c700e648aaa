"""The policy evaluator: compares sensor readings with the owner's and the job's rules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from datetime import date, datetime
from pathlib import Path

import structlog

from device_agent.durable import write_durably
from device_agent.memory import spare_bytes
from device_agent.policy.rules import Decision, decide, may_transfer
from device_agent.policy.sensors import Sensors, local_now
from shared.program import ProgramManifest
from shared.rules import Rules

_log = structlog.get_logger()


class PolicyEvaluator:
    """Decides whether this device may train and use the network, from fresh sensor readings."""

    def __init__(
        self, rules: Rules, sensors: Sensors, budget: DailyMinutes, paused: Callable[[], str | None] = lambda: None
    ) -> None:
        """rules: the owner's. paused: returns why training is paused by the user, or None."""
        self.rules = rules
        self._sensors, self._budget, self._paused = sensors, budget, paused
        self._last: Decision | None = None
        self._at: datetime | None = None

    def training(self, rules: Rules, manifest: ProgramManifest | None = None, needed: int = 0) -> Decision:
        """Decides whether to train now. rules: all that apply. manifest: the program. needed: bytes that training
        will allocate.
        """
        readings = self._sensors.read(rules)
        self._at = readings.at
        why = self._paused()
        if why is not None:
            return Decision(action="wait", why=why)
        self._last = decide(
            rules,
            readings,
            self._budget.spent(readings.at.date()),
            self._last,
            sequence_length=None if manifest is None else manifest.recipe.sequence_length,
            dynamic_length=manifest is not None and manifest.dynamic_length,
            needed_bytes=needed,
        )
        return self._last

    def transfer(self, rules: Rules) -> Decision:
        """Decides whether to download and upload now. rules: all that apply."""
        if rules.metered:
            return Decision(action="train")
        why = may_transfer(rules, self._sensors.read(rules))
        return Decision(action="train") if why is None else Decision(action="wait", why=why)

    def seconds_until(self, decision: Decision) -> float:
        """Returns the seconds until a decision to wait may change; 0 if unknown."""
        if decision.until is None or self._at is None:
            return 0.0
        return (decision.until - self._at).total_seconds()

    def spend(self, seconds: float) -> None:
        """Adds training time in seconds to the day's minutes."""
        today = (self._at or local_now()).date()
        try:
            self._budget.add(seconds / 60, today)
        except OSError as error:
            _log.warning("the training minutes could not be written; they count until a restart", detail=str(error))

    def power(self, rules: Rules) -> tuple[bool | None, float | None]:
        """Returns (on external power, battery percent), each None if unknown."""
        readings = self._sensors.read(rules)
        return readings.charging, readings.battery_percent

    def spare_bytes(self, rules: Rules) -> int:
        """Returns the memory available to training beyond what the rules reserve."""
        available = self._sensors.read(rules).available_bytes
        return max((spare_bytes() if available is None else available) - (rules.memory_floor_bytes or 0), 0)


KEPT_DAYS = 14


class DailyMinutes:
    """Minutes trained by date. A damaged file counts as empty: at worst one day's allowance is granted twice."""

    def __init__(self, path: Path) -> None:
        """path: created by the first `add`."""
        self._path = path
        self._minutes = _read(path)

    def spent(self, today: date) -> float:
        """Returns the minutes trained on a day."""
        return self._minutes.get(today.isoformat(), 0.0)

    def add(self, minutes: float, today: date) -> None:
        """Adds minutes measured with a monotonic clock and syncs the file.

        Raises ValueError for a negative or infinite time, OSError if the disk is full; the minutes then count until
        this process ends.
        """
        if not (math.isfinite(minutes) and minutes >= 0):
            raise ValueError(f"{minutes} is not a training time in minutes")
        # The latest day moves to the end, so that a clock that was far ahead for a while does not evict real days.
        self._minutes[today.isoformat()] = self._minutes.pop(today.isoformat(), 0.0) + minutes
        self._minutes = dict(list(self._minutes.items())[-KEPT_DAYS:])
        write_durably(self._path, json.dumps(self._minutes).encode())


def _read(path: Path) -> dict[str, float]:
    try:
        document = json.loads(path.read_bytes())
        return {date.fromisoformat(day).isoformat(): _minutes(value) for day, value in document.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}


def _minutes(value: object) -> float:
    if not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{value!r} is not a training time in minutes")
    return float(value)
