"""Whether a device may train now: rules held against readings. Pure: knows no sensor, no clock and no file.

A device is throttled before it is stopped. Every rule that stops training lets it begin again only some way past its
threshold, so that a reading on the edge does not flap; that memory is the last `Decision`, which the caller passes in.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Literal

from device_agent.heat import pace, stage_at
from device_agent.sensors import Readings
from shared.rules import Rules
from shared.trajectory import Limits

BATTERY_EASE = 5.0  # percent above the floor before training begins again
HEAT_EASE = 5.0  # degrees Celsius below the ceiling before training begins again
MEMORY_EASE = 0.1  # share of the floor, above it, before training begins again
IDLE_SECONDS = 120.0  # without a person's touch make a device idle
MOST_NAME = 40  # characters of a sensor's name, which is the device's own
MOST_SPANS = 3  # hours told in words
MOST_WORDS = 440  # characters; what a heartbeat takes, less a sign that there is more
BUSY_LOAD, CALM_LOAD = 0.5, 0.3  # share of all processors: others work above the one until below the other

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
]


@dataclass(frozen=True)
class Decision:
    """What a device may do now. `held`, `stage`: what the next decision must know of this one."""

    action: Action
    why: str | None = None  # in words, with numbers; None: nothing holds it back
    rest: float = 0.0  # seconds of pause for each second of work
    max_length: int | None = None  # tokens; None: the recipe's
    until: datetime | None = None  # when training may go on, where that is known; None: when a reading changes
    held: tuple[RuleName, ...] = ()  # the rules that do not allow training now
    stage: int = 0  # of device_agent.heat, by temperature
    unknown: tuple[RuleName, ...] = ()  # rules that no sensor of this device can answer; they are not held

    @property
    def limits(self) -> Limits:
        """For `RunDirectory.limit`."""
        return Limits(rest=self.rest, max_length=self.max_length)


def decide(
    rules: Rules,
    readings: Readings,
    spent_minutes: float,
    last: Decision | None = None,
    *,
    sequence_length: int | None = None,
    dynamic_length: bool = False,
    needed_bytes: int = 0,
) -> Decision:
    """Whether to train, to train slowly or to wait.

    rules: the strictest of the job's and the owner's. spent_minutes: trained today, over all jobs.
    last: the decision before this one; None at the start. sequence_length, dynamic_length: the program's; None while
    there is none yet. needed_bytes: what training takes once it runs; 0 while it runs, as it is taken already.
    """
    held_before = frozenset(last.held if last is not None else ())
    stops = [
        stop
        for stop in (
            _charging(rules, readings),
            _battery(rules, readings, "battery_floor" in held_before),
            _heat(rules, readings, "temperature_ceiling" in held_before),
            _memory(rules, readings, "memory_floor_bytes" in held_before, needed_bytes),
            _idle(rules, readings, "idle" in held_before),
            _hours(rules, readings),
            _budget(rules, readings, spent_minutes),
        )
        if stop is not None
    ]
    stage, unknown = 0, _unknown(rules, readings)
    if rules.temperature_ceiling is not None:
        last_stage = last.stage if last is not None else 0
        stage = stage_at(rules.temperature_ceiling, readings.temperature, readings.throttled, last_stage)
    if stops:
        untils = [stop.until for stop in stops]
        return Decision(
            action="wait",
            why=_together([stop.why for stop in stops]),
            until=max(until for until in untils if until is not None) if None not in untils else None,
            held=tuple(stop.rule for stop in stops),
            stage=stage,
            unknown=unknown,
        )
    if rules.temperature_ceiling is None or stage == 0:
        return Decision(action="train", unknown=unknown)
    rest, max_length = pace(stage, sequence_length if dynamic_length else None)
    return Decision(
        action="slow",
        why=_slow_words(rules.temperature_ceiling, readings, rest, max_length),
        rest=rest,
        max_length=max_length,
        stage=stage,
        unknown=unknown,
    )


def may_transfer(rules: Rules, readings: Readings) -> str | None:
    """Why downloads and uploads must wait, in words; None if they may go on.

    readings: of the machine that transfers, which for a phone behind adb is the agent's own.
    """
    if rules.metered or not readings.metered:
        return None
    return "the network in use is metered, and the rules keep downloads and uploads off it; waits for another network"


@dataclass(frozen=True)
class _Stop:
    """One rule that does not allow training now, and why."""

    rule: RuleName
    why: str
    until: datetime | None = None


def _charging(rules: Rules, readings: Readings) -> _Stop | None:
    if not rules.charging or readings.charging is not False:
        return None
    return _Stop("charging", "on battery; waits for external power")


def _battery(rules: Rules, readings: Readings, held: bool) -> _Stop | None:
    floor, percent = rules.battery_floor, readings.battery_percent
    if floor is None or percent is None or readings.charging:
        return None
    if percent < floor:
        return _Stop(
            "battery_floor",
            f"battery at {_short(percent)} %, below the floor of {_short(floor)} %; waits for external power",
        )
    again = min(floor + BATTERY_EASE, 100.0)
    if held and percent < again:
        words = f"battery at {_short(percent)} %; goes on from {_short(again)} % or with external power"
        return _Stop("battery_floor", words)
    return None


def _heat(rules: Rules, readings: Readings, held: bool) -> _Stop | None:
    ceiling, temperature = rules.temperature_ceiling, readings.temperature
    if ceiling is None or temperature is None:
        return None
    if temperature >= ceiling:
        words = f"{_where(readings)}, at or above the ceiling of {_short(ceiling)} °C; waits until it cools down"
        return _Stop("temperature_ceiling", words)
    again = ceiling - HEAT_EASE
    if held and temperature > again:
        return _Stop("temperature_ceiling", f"{_where(readings)}; cools down and goes on at {_short(again)} °C")
    return None


def _memory(rules: Rules, readings: Readings, held: bool, needed: int) -> _Stop | None:
    floor, available = rules.memory_floor_bytes, readings.available_bytes
    if floor is None or available is None:
        return None
    wanted = (floor * (1 + MEMORY_EASE) if held else floor) + needed
    if available >= wanted:
        return None
    words = f"{_mebibytes(available)} of memory free, {_mebibytes(wanted)} wanted"
    if needed:
        words += f" ({_mebibytes(needed)} of it for the training)"
    return _Stop("memory_floor_bytes", f"{words}; waits until other programs need less")


def _idle(rules: Rules, readings: Readings, held: bool) -> _Stop | None:
    if not rules.idle:
        return None
    if readings.idle_seconds is not None and readings.idle_seconds < IDLE_SECONDS:
        # How long ago is nobody's business but the device's.
        return _Stop("idle", f"somebody uses the device; waits until nobody has for {IDLE_SECONDS:.0f} s")
    if readings.load is not None and (readings.load >= BUSY_LOAD or (held and readings.load > CALM_LOAD)):
        words = f"other programs use {readings.load:.0%} of the processors"
        return _Stop("idle", f"{words}; waits until it is {CALM_LOAD:.0%} or less")
    return None


def _hours(rules: Rules, readings: Readings) -> _Stop | None:
    if all(span.holds(readings.at.time()) for span in rules.hours):
        return None
    spans = " and ".join(f"{span.start:%H:%M} to {span.end:%H:%M}" for span in rules.hours[:MOST_SPANS])
    if len(rules.hours) > MOST_SPANS:
        spans += f" and {len(rules.hours) - MOST_SPANS} more"
    opening = _opening(rules, readings.at)
    if opening is None:
        return _Stop("hours", f"the hours {spans} have no time in common; nothing trains until a rule changes")
    return _Stop("hours", f"outside the hours {spans}; waits until {opening:%H:%M}", opening)


def _opening(rules: Rules, at: datetime) -> datetime | None:
    """The next moment that lies in every span; None if there is none. Such a moment is some span's start."""
    starts = sorted(
        datetime.combine(at.date() + timedelta(days=day), span.start, at.tzinfo)
        for day in (0, 1)
        for span in rules.hours
    )
    return next((start for start in starts if start > at and all(s.holds(start.time()) for s in rules.hours)), None)


def _budget(rules: Rules, readings: Readings, spent_minutes: float) -> _Stop | None:
    if rules.daily_minutes is None or spent_minutes < rules.daily_minutes:
        return None
    tomorrow = datetime.combine(readings.at.date() + timedelta(days=1), time(), readings.at.tzinfo)
    words = f"trained {_short(spent_minutes)} of {_short(rules.daily_minutes)} minutes today; waits until midnight"
    return _Stop("daily_minutes", words, tomorrow)


def _slow_words(ceiling: float, readings: Readings, rest: float, max_length: int | None) -> str:
    words = _where(readings) if readings.temperature is not None else "temperature unknown"
    words += f" under a ceiling of {_short(ceiling)} °C"
    if readings.throttled:
        words += ", and the system slows its processors down"
    words += f"; rests {_short(rest)} s for each second of work"
    return words if max_length is None else f"{words}, examples of at most {max_length} tokens"


def _unknown(rules: Rules, readings: Readings) -> tuple[RuleName, ...]:
    asked: tuple[tuple[RuleName, bool, object], ...] = (
        ("charging", rules.charging, readings.charging),
        # On external power the battery does not matter.
        ("battery_floor", rules.battery_floor is not None and not readings.charging, readings.battery_percent),
        ("temperature_ceiling", rules.temperature_ceiling is not None, readings.temperature),
        ("memory_floor_bytes", rules.memory_floor_bytes is not None, readings.available_bytes),
        ("idle", rules.idle, readings.idle_seconds),
        ("metered", not rules.metered, readings.metered),
    )
    return tuple(name for name, ruled, answer in asked if ruled and answer is None)


def _together(whys: list[str]) -> str:
    words = whys[0]
    for told, why in enumerate(whys[1:], start=1):
        if len(words) + len(why) > MOST_WORDS:
            return f"{words}; and {len(whys) - told} more"
        words += f"; {why}"
    return words


def _where(readings: Readings) -> str:
    at = f" at {readings.temperature_sensor[:MOST_NAME]}" if readings.temperature_sensor else ""
    return f"{_short(readings.temperature or 0.0)} °C{at}"


def _short(value: float) -> str:
    return f"{round(value, 1):g}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"
