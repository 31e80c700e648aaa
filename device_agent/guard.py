"""The device's own say in training: its sensors held against its owner's rules and a job's. Knows no HTTP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import structlog

from device_agent.budget import DailyBudget
from device_agent.memory import spare_bytes
from device_agent.policy import Decision, decide, may_transfer
from device_agent.sensors import Sensors, local_now
from shared.program import ProgramManifest
from shared.rules import Rules

_log = structlog.get_logger()


class Guard:
    """Answers whether this device may train, and whether it may use the network, at each look at its sensors."""

    def __init__(
        self, rules: Rules, sensors: Sensors, budget: DailyBudget, paused: Callable[[], str | None] = lambda: None
    ) -> None:
        """rules: the owner's. paused: why a person wants no training now, in words; None: nobody does."""
        self.rules = rules
        self._sensors, self._budget, self._paused = sensors, budget, paused
        self._last: Decision | None = None
        self._at: datetime | None = None

    def training(self, rules: Rules, manifest: ProgramManifest | None = None, needed: int = 0) -> Decision:
        """Whether to train now. rules: all that hold. manifest: the program. needed: bytes that training is to take."""
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
        """Whether to download and upload now. rules: all that hold."""
        if rules.metered:
            return Decision(action="train")
        why = may_transfer(rules, self._sensors.read(rules))
        return Decision(action="train") if why is None else Decision(action="wait", why=why)

    def seconds_until(self, decision: Decision) -> float:
        """Seconds from the last look to when a decision to wait may change; 0 where nobody can know."""
        if decision.until is None or self._at is None:
            return 0.0
        return (decision.until - self._at).total_seconds()

    def spend(self, seconds: float) -> None:
        """Counts time trained against the day's budget."""
        today = (self._at or local_now()).date()
        try:
            self._budget.add(seconds / 60, today)
        except OSError as error:
            _log.warning("the minutes trained are not on disk; they count until a restart", detail=str(error))

    def power(self, rules: Rules) -> tuple[bool | None, float | None]:
        """(on external power, percent of the battery), each None where nothing can tell."""
        readings = self._sensors.read(rules)
        return readings.charging, readings.battery_percent

    def spare_bytes(self, rules: Rules) -> int:
        """Memory that training could have beside what the rules keep free."""
        available = self._sensors.read(rules).available_bytes
        return max((spare_bytes() if available is None else available) - (rules.memory_floor_bytes or 0), 0)
