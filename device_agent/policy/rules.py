"""Decides from rules and sensor readings whether a device may train now; pure functions.

A device is slowed down before it is stopped. Every rule resumes training only some margin past its threshold
(hysteresis); the caller passes in the previous `Decision` for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Literal

from device_agent.policy.sensors import ReadingName, Readings
from shared.rules import Rules

BATTERY_EASE = 5.0  # percent above the floor before training begins again
TEMPERATURE_EASE = 5.0  # degrees Celsius below the ceiling before training begins again
MEMORY_EASE = 0.1  # share of the floor, above it, before training begins again
IDLE_SECONDS = 120.0  # without input until a device counts as idle
MAX_WHY = 500  # characters of all reasons, which a heartbeat takes
WARM_MARGIN = 8.0  # degrees Celsius under the ceiling from which training pauses between steps
MAX_REST = 8.0  # seconds of pause for each second of work
BUSY_LOAD, CALM_LOAD = 0.5, 0.3  # share of all processors: other programs are busy from the first to the second

Action = Literal["train", "slow", "wait"]
RuleName = Literal[
    "charging",
    "battery_floor",
    "temperature_ceiling",
    "memory_floor_bytes",
    "idle",
    "hours",
    "metered",
    "daily_minutes",
    "sensors",  # no rule of an owner: a sensor that a rule needs is lost
]


@dataclass(frozen=True)
class Decision:
    """What a device may do now. `held` is state for the next decision.

    The server may see `why`, which contains no measured value. `measured` stays on the device.
    """

    action: Action
    why: str | None = None  # the reasons to wait or to slow down; None: there are none
    measured: str | None = None  # the readings behind `why`
    rest: float = 0.0  # seconds of pause for each second of work
    until: datetime | None = None  # when training may continue; None: unknown, when a reading changes
    held: tuple[RuleName, ...] = ()  # the rules that do not allow training now
    unknown: tuple[RuleName, ...] = ()  # rules without a sensor on this device; they are not enforced

    @property
    def local_why(self) -> str:
        """The reasons with the readings, for the owner of this device only."""
        why = self.why or "the rules do not allow it now"
        return f"{why} (measured: {self.measured})" if self.measured else why


def decide(
    rules: Rules,
    readings: Readings,
    spent_minutes: float,
    last: Decision | None = None,
    *,
    needed_bytes: int = 0,
) -> Decision:
    """Decides whether to train, to train slowly or to wait.

    rules: the strictest of the job's and the owner's. spent_minutes: trained today, over all jobs. last: the previous
    decision; None at the start. needed_bytes: memory that training will allocate; 0 while it runs.
    """
    held_before = frozenset(last.held if last is not None else ())
    lost, unknown = _unanswered(rules, readings)
    stops = [
        stop
        for stop in (
            _sensors(lost),
            _charging(rules, readings),
            _battery(rules, readings, "battery_floor" in held_before),
            _temperature(rules, readings, "temperature_ceiling" in held_before),
            _memory(rules, readings, "memory_floor_bytes" in held_before, needed_bytes),
            _idle(rules, readings, "idle" in held_before),
            _hours(rules, readings),
            _budget(rules, readings, spent_minutes),
        )
        if stop is not None
    ]
    if stops:
        end_times = [stop.until for stop in stops]
        stopped = tuple(rule for stop in stops for rule in stop.held)
        return Decision(
            action="wait",
            why="; ".join(stop.why or "" for stop in stops)[:MAX_WHY],
            measured=", ".join(stop.measured for stop in stops if stop.measured) or None,
            until=max(until for until in end_times if until is not None) if None not in end_times else None,
            held=stopped + tuple(rule for rule in lost if rule in held_before and rule not in stopped),
            unknown=unknown,
        )
    ceiling, temperature = rules.temperature_ceiling, readings.temperature
    if ceiling is None or temperature is None or temperature < ceiling - WARM_MARGIN:
        return Decision(action="train", unknown=unknown)
    rest = min(WARM_MARGIN / (ceiling - temperature), MAX_REST)
    return Decision(
        action="slow",
        why=f"near the temperature ceiling of {_short(ceiling)} °C; pauses between steps",
        measured=f"{_where(readings)}; pauses {_short(rest)} s for each second of work",
        rest=rest,
        unknown=unknown,
    )


def decide_transfer(rules: Rules, readings: Readings) -> Decision:
    """Decides whether to use the network.

    readings: of the machine that transfers, which for a phone behind adb is the host.
    """
    if rules.metered or not readings.metered:
        return Decision(action="train")
    why = "the network is metered, and the rules forbid downloads and uploads on it; waits for another network"
    return Decision(action="wait", why=why)


def _stop(rule: RuleName, why: str, measured: str | None = None, until: datetime | None = None) -> Decision:
    """Returns the decision of one rule that forbids training now."""
    return Decision("wait", why, measured, until=until, held=(rule,))


def _sensors(lost: tuple[RuleName, ...]) -> Decision | None:
    if not lost:
        return None
    why = "a sensor that a rule needs cannot be read; waits until the phone responds"
    return _stop("sensors", why, f"no reading for {', '.join(lost)}")


def _charging(rules: Rules, readings: Readings) -> Decision | None:
    if not rules.charging or readings.charging is not False:
        return None
    return _stop("charging", "on battery; waits for external power")


def _battery(rules: Rules, readings: Readings, was_waiting: bool) -> Decision | None:
    floor, percent = rules.battery_floor, readings.battery_percent
    if floor is None or percent is None or readings.charging:
        return None
    measured = f"battery at {_short(percent)} %"
    if percent < floor:
        why = f"battery below the floor of {_short(floor)} %; waits for external power"
        return _stop("battery_floor", why, measured)
    resume_percent = min(floor + BATTERY_EASE, 100.0)
    if was_waiting and percent < resume_percent:
        why = f"battery low; continues from {_short(resume_percent)} % or with external power"
        return _stop("battery_floor", why, measured)
    return None


def _temperature(rules: Rules, readings: Readings, was_waiting: bool) -> Decision | None:
    ceiling, temperature = rules.temperature_ceiling, readings.temperature
    if ceiling is None or temperature is None:
        return None
    if temperature >= ceiling:
        why = f"at or above the temperature ceiling of {_short(ceiling)} °C; waits until the device cools down"
        return _stop("temperature_ceiling", why, _where(readings))
    resume_temperature = ceiling - TEMPERATURE_EASE
    if was_waiting and temperature > resume_temperature:
        why = f"the device cools down; continues at {_short(resume_temperature)} °C"
        return _stop("temperature_ceiling", why, _where(readings))
    return None


def _memory(rules: Rules, readings: Readings, was_waiting: bool, needed: int) -> Decision | None:
    floor, available = rules.memory_floor_bytes, readings.available_bytes
    if floor is None or available is None:
        return None
    required = (floor * (1 + MEMORY_EASE) if was_waiting else floor) + needed
    if available >= required:
        return None
    why = f"less than {_mebibytes(required)} of memory free"
    if needed:
        why += f" ({_mebibytes(needed)} of it for training)"
    return _stop(
        "memory_floor_bytes", f"{why}; waits until other programs need less", f"{_mebibytes(available)} of memory free"
    )


def _idle(rules: Rules, readings: Readings, was_waiting: bool) -> Decision | None:
    if not rules.idle:
        return None
    if readings.idle_seconds is not None and readings.idle_seconds < IDLE_SECONDS:
        return _stop("idle", f"the device is in use; waits until it has been idle for {IDLE_SECONDS:.0f} s")
    if readings.load is not None and (readings.load >= BUSY_LOAD or (was_waiting and readings.load > CALM_LOAD)):
        why = f"other programs use the processors; waits until they use {CALM_LOAD:.0%} or less"
        return _stop("idle", why, f"other programs use {readings.load:.0%} of the processors")
    return None


def _hours(rules: Rules, readings: Readings) -> Decision | None:
    if all(span.contains(readings.at.time()) for span in rules.hours):
        return None
    spans = " and ".join(f"{span.start:%H:%M} to {span.end:%H:%M}" for span in rules.hours)
    opening = _opening(rules, readings.at)
    if opening is None:
        return _stop("hours", f"the hours {spans} do not overlap; no training until a rule changes")
    return _stop("hours", f"outside the hours {spans}; waits until {opening:%H:%M}", until=opening)


def _opening(rules: Rules, at: datetime) -> datetime | None:
    """Returns the next moment that lies in every span, or None. Such a moment is the start of a span."""
    starts = sorted(
        datetime.combine(at.date() + timedelta(days=day), span.start, at.tzinfo)
        for day in (0, 1)
        for span in rules.hours
    )
    return next((start for start in starts if start > at and all(s.contains(start.time()) for s in rules.hours)), None)


def _budget(rules: Rules, readings: Readings, spent_minutes: float) -> Decision | None:
    if rules.daily_minutes is None or spent_minutes < rules.daily_minutes:
        return None
    tomorrow = datetime.combine(readings.at.date() + timedelta(days=1), time(), readings.at.tzinfo)
    why = f"the day's {_short(rules.daily_minutes)} minutes of training are used up; waits until midnight"
    return _stop("daily_minutes", why, f"{_short(spent_minutes)} minutes trained", tomorrow)


def _unanswered(rules: Rules, readings: Readings) -> tuple[tuple[RuleName, ...], tuple[RuleName, ...]]:
    """Returns the rules whose sensor is lost, and those for which the device has no sensor."""
    readings_of_rules: tuple[tuple[RuleName, bool, ReadingName | Literal["metered"]], ...] = (
        ("charging", rules.charging, "charging"),
        # On external power the battery does not matter.
        ("battery_floor", rules.battery_floor is not None and not readings.charging, "battery_percent"),
        ("temperature_ceiling", rules.temperature_ceiling is not None, "temperature"),
        ("memory_floor_bytes", rules.memory_floor_bytes is not None, "available_bytes"),
        ("idle", rules.idle, "idle_seconds"),
        ("metered", not rules.metered, "metered"),
    )
    unanswered = [
        (rule, name) for rule, applies, name in readings_of_rules if applies and getattr(readings, name) is None
    ]
    return (
        tuple(rule for rule, name in unanswered if name in readings.lost),
        tuple(rule for rule, name in unanswered if name not in readings.lost),
    )


def _where(readings: Readings) -> str:
    at = f" at {readings.temperature_sensor}" if readings.temperature_sensor else ""
    return f"{_short(readings.temperature or 0.0)} °C{at}"


def _short(value: float) -> str:
    return f"{round(value, 1):g}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"
