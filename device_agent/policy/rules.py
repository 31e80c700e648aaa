"""Decides from rules and sensor readings whether a device may train now; pure functions.

A device is slowed down before it is stopped. Every rule resumes training only some margin past its threshold
(hysteresis); the caller passes in the previous `Decision` for this.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Literal

from device_agent.policy.sensors import Readings
from shared.rules import Rules
from shared.zo.trajectory import Limits

BATTERY_EASE = 5.0  # percent above the floor before training begins again
TEMPERATURE_EASE = 5.0  # degrees Celsius below the ceiling before training begins again
MEMORY_EASE = 0.1  # share of the floor, above it, before training begins again
IDLE_SECONDS = 120.0  # without input until a device counts as idle
MAX_NAME = 40  # characters of a sensor's name
MAX_SPANS = 3  # spans of hours in a message
MAX_REASONS = 440  # characters of all reasons; a heartbeat takes 500
STAGE_EASE = 1.0  # degrees Celsius below a stage's threshold before the previous stage applies again
SHORTEST = 32  # tokens; shorter examples would hardly contain a question and its answer
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
]


@dataclass(frozen=True)
class Stage:
    """What applies while the temperature is at most `below` degrees Celsius under the ceiling."""

    below: float
    rest: float  # seconds of pause for each second of work
    share: float  # of the sequence length, if the program accepts shorter examples
    fixed_rest: float  # the pause if it does not


# Stage 0 is full speed; stage i is STAGES[i - 1].
STAGES = (
    Stage(8.0, 0.5, 1.0, 0.5),
    Stage(6.0, 1.0, 1.0, 1.0),
    Stage(4.0, 2.0, 1.0, 2.0),
    Stage(2.0, 2.0, 0.5, 4.0),
    Stage(1.0, 4.0, 0.25, 8.0),
)
THROTTLED_STAGE = 2  # minimum while the system throttles its processors


@dataclass(frozen=True)
class Decision:
    """What a device may do now. `held` and `stage` are state for the next decision."""

    action: Action
    why: str | None = None  # the reasons to wait or to slow down; None: there are none
    rest: float = 0.0  # seconds of pause for each second of work
    max_length: int | None = None  # tokens; None: the recipe's
    until: datetime | None = None  # when training may continue; None: unknown, when a reading changes
    held: tuple[RuleName, ...] = ()  # the rules that do not allow training now
    stage: int = 0  # of thermal throttling
    unknown: tuple[RuleName, ...] = ()  # rules without a sensor on this device; they are not enforced

    @property
    def limits(self) -> Limits:
        """The limits for `RunDirectory.limit`."""
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
    """Decides whether to train, to train slowly or to wait.

    rules: the strictest of the job's and the owner's. spent_minutes: trained today, over all jobs. last: the previous
    decision; None at the start. sequence_length, dynamic_length: the program's, if there is one. needed_bytes: memory
    that training will allocate; 0 while it runs.
    """
    held_before = frozenset(last.held if last is not None else ())
    stops = [
        stop
        for stop in (
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
    stage, unknown = 0, _unknown(rules, readings)
    if rules.temperature_ceiling is not None:
        last_stage = last.stage if last is not None else 0
        stage = stage_at(rules.temperature_ceiling, readings.temperature, readings.throttled, last_stage)
    if stops:
        end_times = [stop.until for stop in stops]
        return Decision(
            action="wait",
            why=_joined([stop.why for stop in stops]),
            until=max(until for until in end_times if until is not None) if None not in end_times else None,
            held=tuple(stop.rule for stop in stops),
            stage=stage,
            unknown=unknown,
        )
    if rules.temperature_ceiling is None or stage == 0:
        return Decision(action="train", unknown=unknown)
    rest, max_length = pace(stage, sequence_length if dynamic_length else None)
    return Decision(
        action="slow",
        why=_slow_reason(rules.temperature_ceiling, readings, rest, max_length),
        rest=rest,
        max_length=max_length,
        stage=stage,
        unknown=unknown,
    )


def may_transfer(rules: Rules, readings: Readings) -> str | None:
    """Returns why transfers must wait, or None.

    readings: of the machine that transfers, which for a phone behind adb is the host.
    """
    if rules.metered or not readings.metered:
        return None
    return "the network is metered, and the rules forbid downloads and uploads on it; waits for another network"


@dataclass(frozen=True)
class _Stop:
    """One rule that forbids training now, and why."""

    rule: RuleName
    why: str
    until: datetime | None = None


def _charging(rules: Rules, readings: Readings) -> _Stop | None:
    if not rules.charging or readings.charging is not False:
        return None
    return _Stop("charging", "on battery; waits for external power")


def _battery(rules: Rules, readings: Readings, was_waiting: bool) -> _Stop | None:
    floor, percent = rules.battery_floor, readings.battery_percent
    if floor is None or percent is None or readings.charging:
        return None
    if percent < floor:
        return _Stop(
            "battery_floor",
            f"battery at {_short(percent)} %, below the floor of {_short(floor)} %; waits for external power",
        )
    resume_percent = min(floor + BATTERY_EASE, 100.0)
    if was_waiting and percent < resume_percent:
        why = f"battery at {_short(percent)} %; continues from {_short(resume_percent)} % or with external power"
        return _Stop("battery_floor", why)
    return None


def _temperature(rules: Rules, readings: Readings, was_waiting: bool) -> _Stop | None:
    ceiling, temperature = rules.temperature_ceiling, readings.temperature
    if ceiling is None or temperature is None:
        return None
    if temperature >= ceiling:
        why = f"{_where(readings)}, at or above the ceiling of {_short(ceiling)} °C; waits until it cools down"
        return _Stop("temperature_ceiling", why)
    resume_temperature = ceiling - TEMPERATURE_EASE
    if was_waiting and temperature > resume_temperature:
        return _Stop(
            "temperature_ceiling", f"{_where(readings)}; cools down and continues at {_short(resume_temperature)} °C"
        )
    return None


def _memory(rules: Rules, readings: Readings, was_waiting: bool, needed: int) -> _Stop | None:
    floor, available = rules.memory_floor_bytes, readings.available_bytes
    if floor is None or available is None:
        return None
    required = (floor * (1 + MEMORY_EASE) if was_waiting else floor) + needed
    if available >= required:
        return None
    why = f"{_mebibytes(available)} of memory free, {_mebibytes(required)} required"
    if needed:
        why += f" ({_mebibytes(needed)} of it for training)"
    return _Stop("memory_floor_bytes", f"{why}; waits until other programs need less")


def _idle(rules: Rules, readings: Readings, was_waiting: bool) -> _Stop | None:
    if not rules.idle:
        return None
    if readings.idle_seconds is not None and readings.idle_seconds < IDLE_SECONDS:
        # The reason is sent to the server, so it does not contain the idle time.
        return _Stop("idle", f"the device is in use; waits until it has been idle for {IDLE_SECONDS:.0f} s")
    if readings.load is not None and (readings.load >= BUSY_LOAD or (was_waiting and readings.load > CALM_LOAD)):
        why = f"other programs use {readings.load:.0%} of the processors"
        return _Stop("idle", f"{why}; waits until they use {CALM_LOAD:.0%} or less")
    return None


def _hours(rules: Rules, readings: Readings) -> _Stop | None:
    if all(span.contains(readings.at.time()) for span in rules.hours):
        return None
    spans = " and ".join(f"{span.start:%H:%M} to {span.end:%H:%M}" for span in rules.hours[:MAX_SPANS])
    if len(rules.hours) > MAX_SPANS:
        spans += f" and {len(rules.hours) - MAX_SPANS} more"
    opening = _opening(rules, readings.at)
    if opening is None:
        return _Stop("hours", f"the hours {spans} do not overlap; no training until a rule changes")
    return _Stop("hours", f"outside the hours {spans}; waits until {opening:%H:%M}", opening)


def _opening(rules: Rules, at: datetime) -> datetime | None:
    """Returns the next moment that lies in every span, or None. Such a moment is the start of a span."""
    starts = sorted(
        datetime.combine(at.date() + timedelta(days=day), span.start, at.tzinfo)
        for day in (0, 1)
        for span in rules.hours
    )
    return next((start for start in starts if start > at and all(s.contains(start.time()) for s in rules.hours)), None)


def _budget(rules: Rules, readings: Readings, spent_minutes: float) -> _Stop | None:
    if rules.daily_minutes is None or spent_minutes < rules.daily_minutes:
        return None
    tomorrow = datetime.combine(readings.at.date() + timedelta(days=1), time(), readings.at.tzinfo)
    why = f"trained {_short(spent_minutes)} of {_short(rules.daily_minutes)} minutes today; waits until midnight"
    return _Stop("daily_minutes", why, tomorrow)


def _slow_reason(ceiling: float, readings: Readings, rest: float, max_length: int | None) -> str:
    why = _where(readings) if readings.temperature is not None else "temperature unknown"
    why += f" under a ceiling of {_short(ceiling)} °C"
    if readings.throttled:
        why += ", and the system throttles its processors"
    why += f"; pauses {_short(rest)} s for each second of work"
    return why if max_length is None else f"{why}, examples of at most {max_length} tokens"


def _unknown(rules: Rules, readings: Readings) -> tuple[RuleName, ...]:
    readings_of_rules: tuple[tuple[RuleName, bool, object], ...] = (
        ("charging", rules.charging, readings.charging),
        # On external power the battery does not matter.
        ("battery_floor", rules.battery_floor is not None and not readings.charging, readings.battery_percent),
        ("temperature_ceiling", rules.temperature_ceiling is not None, readings.temperature),
        ("memory_floor_bytes", rules.memory_floor_bytes is not None, readings.available_bytes),
        ("idle", rules.idle, readings.idle_seconds),
        ("metered", not rules.metered, readings.metered),
    )
    return tuple(name for name, applies, reading in readings_of_rules if applies and reading is None)


def _joined(reasons: list[str]) -> str:
    joined = reasons[0]
    for count, reason in enumerate(reasons[1:], start=1):
        if len(joined) + len(reason) > MAX_REASONS:
            return f"{joined}; and {len(reasons) - count} more"
        joined += f"; {reason}"
    return joined


def _where(readings: Readings) -> str:
    at = f" at {readings.temperature_sensor[:MAX_NAME]}" if readings.temperature_sensor else ""
    return f"{_short(readings.temperature or 0.0)} °C{at}"


def _short(value: float) -> str:
    return f"{round(value, 1):g}"


def _mebibytes(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def stage_at(ceiling: float, temperature: float | None, throttled: bool | None, last: int) -> int:
    """Returns the stage, 0 to len(STAGES), at a temperature (degrees Celsius) after stage `last`."""
    stage = 0
    if temperature is not None:
        # The stage rises at its threshold and falls only STAGE_EASE below it; in between it stays the same.
        lowest_stage = _thresholds_passed(ceiling - temperature)
        highest_stage = _thresholds_passed(ceiling - temperature - STAGE_EASE)
        stage = max(lowest_stage, min(last, highest_stage))
    return max(stage, THROTTLED_STAGE) if throttled else stage


def _thresholds_passed(margin: float) -> int:
    return sum(margin <= stage.below for stage in STAGES)


def pace(stage: int, sequence_length: int | None) -> tuple[float, int | None]:
    """Returns (seconds of pause per second of work, maximum tokens per example or None) at a stage.

    sequence_length: the recipe's; None if the program requires full length.
    """
    if stage == 0:
        return 0.0, None
    settings = STAGES[stage - 1]
    if sequence_length is None or sequence_length <= SHORTEST:
        return settings.fixed_rest, None
    length = max(SHORTEST, int(sequence_length * settings.share))
    return settings.rest, None if length == sequence_length else length
