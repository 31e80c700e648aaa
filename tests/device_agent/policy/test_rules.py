"""Rules held against readings: tables of what must come out, and properties of any decision."""

from datetime import datetime, time, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.policy.phone_sensors import MARK, AdbSensors
from device_agent.policy.rules import (
    BATTERY_EASE,
    IDLE_SECONDS,
    MEMORY_EASE,
    Decision,
    decide,
    decide_transfer,
)
from device_agent.policy.sensors import READING_NAMES, Readings
from shared.job import Progress
from shared.rules import QuietHours, Rules
from tests.shared.test_rules import intervals
from tests.shared.test_rules import rules as any_rules

RECORDINGS = Path(__file__).parents[1] / "recordings"
ZONE = timezone(timedelta(hours=2))
NOON = datetime(2026, 11, 21, 12, tzinfo=ZONE)
RULES = tuple(Rules.model_fields)
RANKS = {"train": 0, "slow": 1, "wait": 2}
GIB = 1 << 30


def maybe(low, high):
    return st.none() | st.floats(low, high)


any_readings = st.builds(
    Readings,
    at=st.datetimes(datetime(2025, 1, 1), datetime(2027, 1, 1), timezones=st.just(ZONE)),
    charging=st.none() | st.booleans(),
    battery_percent=maybe(0, 100),
    temperature=maybe(-20, 120),
    temperature_sensor=st.none() | st.just("cpu"),
    available_bytes=st.none() | st.integers(0, 1 << 40),
    idle_seconds=maybe(0, 1e6),
    load=maybe(0, 1),
    metered=st.none() | st.booleans(),
    lost=st.lists(st.sampled_from(READING_NAMES), unique=True).map(tuple),
)
any_last = st.none() | st.builds(
    lambda held: Decision("wait" if held else "train", held=tuple(held)),
    st.lists(st.sampled_from((*RULES, "sensors")), unique=True),
)
needs = st.integers(0, 1 << 35)  # bytes that training will allocate
minutes = st.floats(0, 1440)


def at_noon(**values):
    return Readings(at=NOON, **values)


def holding(decision):
    """How strongly a decision holds back: comparable, greater is stronger."""
    return RANKS[decision.action], decision.rest if decision.action == "slow" else 0.0


def phone(name):
    def shell(_line):
        files = sorted((RECORDINGS / name).glob("*.txt"))
        return "".join(f"{MARK}{file.stem}\n{file.read_text()}" for file in files)

    return AdbSensors(shell).read()


@pytest.mark.parametrize(
    ("rules", "action", "why", "measured"),
    [
        ({}, "train", None, None),
        ({"charging": True}, "wait", "on battery; waits for external power", None),
        ({"battery_floor": 30}, "wait", "battery below the floor of 30 %; waits for external power", "battery at 18 %"),
        (
            {"temperature_ceiling": 78},
            "wait",
            "at or above the temperature ceiling of 78 °C; waits until the device cools down",
            "78.3 °C at cpu4-gold-usr",
        ),
        (
            {"temperature_ceiling": 82.3},
            "slow",
            "near the temperature ceiling of 82.3 °C; pauses between steps",
            "78.3 °C at cpu4-gold-usr; pauses 2 s for each second of work",
        ),
        (
            {"memory_floor_bytes": GIB},
            "wait",
            "less than 1024 MiB of memory free; waits until other programs need less",
            "685 MiB of memory free",
        ),
        ({"idle": True}, "wait", "the device is in use; waits until it has been idle for 120 s", None),
        (
            {"hours": [{"start": "22:00", "end": "06:00"}]},
            "wait",
            "outside the hours 22:00 to 06:00; waits until 22:00",
            None,
        ),
        (
            {"daily_minutes": 40},
            "wait",
            "the day's 40 minutes of training are used up; waits until midnight",
            "42.5 minutes trained",
        ),
    ],
)
def test_recorded_readings(rules, action, why, measured):
    decision = decide(Rules(**rules), phone("android_hot").model_copy(update={"at": NOON}), 42.5)
    assert (decision.action, decision.why, decision.measured, decision.unknown) == (action, why, measured, ())


def test_the_owner_sees_the_readings_behind_a_reason():
    decision = decide(Rules(battery_floor=30, idle=True), at_noon(battery_percent=18, load=0.574), 0)
    assert decision.local_why == (
        "battery below the floor of 30 %; waits for external power; other programs use the processors; waits until "
        "they use 30% or less (measured: battery at 18 %, other programs use 57% of the processors)"
    )
    assert decide(Rules(charging=True), at_noon(charging=False), 0).local_why == "on battery; waits for external power"


LOST = {"lost": READING_NAMES}
ON_PHONE = Rules(charging=True, battery_floor=30, temperature_ceiling=80, memory_floor_bytes=GIB, idle=True)


@pytest.mark.parametrize("rule", ["charging", "battery_floor", "temperature_ceiling", "memory_floor_bytes", "idle"])
def test_a_rule_whose_sensor_is_lost_waits(rule):
    rules = Rules(**{rule: getattr(ON_PHONE, rule)})
    decision = decide(rules, at_noon(**LOST), 0)
    assert (decision.action, decision.held, decision.unknown) == ("wait", ("sensors",), ())
    assert decision.why == "a sensor that a rule needs cannot be read; waits until the phone responds"
    assert decision.measured == f"no reading for {rule}"
    assert decide(rules, at_noon(), 0).unknown == (rule,)  # a device without this sensor


def test_a_lost_sensor_holds_nobody_without_a_rule_for_it():
    for rules in (Rules(), Rules(metered=False), Rules(hours=({"start": "11:00", "end": "13:00"},), daily_minutes=30)):
        assert decide(rules, at_noon(**LOST), 20).action == "train"
    assert decide(Rules(battery_floor=30), at_noon(battery_percent=80, lost=("temperature",)), 0).action == "train"
    assert decide(Rules(battery_floor=30), at_noon(charging=True, lost=("battery_percent",)), 0).action == "train"
    assert decide(Rules(daily_minutes=30), at_noon(**LOST), 30).held == ("daily_minutes",)


def test_a_rule_outlasts_a_lost_sensor():
    rules, low, between = Rules(battery_floor=30), {"battery_percent": 29}, {"battery_percent": 32}
    held = decide(rules, at_noon(**LOST), 0, decide(rules, at_noon(**low), 0))
    assert held.held == ("sensors", "battery_floor")
    assert decide(rules, at_noon(**between), 0, held).action == "wait"
    free = decide(rules, at_noon(**LOST), 0, decide(rules, at_noon(**between), 0))
    assert free.held == ("sensors",)
    assert decide(rules, at_noon(**between), 0, free).action == "train"


BATTERY, MEMORY, IDLE = ({"battery_floor": 30}, {"memory_floor_bytes": GIB}, {"idle": True})
ENOUGH = int(GIB * (1 + MEMORY_EASE)) + 100  # bytes, for a program that needs 100


@pytest.mark.parametrize(
    ("rule", "readings", "held", "action"),
    [
        (BATTERY, {"battery_percent": 30, "charging": False}, False, "train"),
        (BATTERY, {"battery_percent": 29.9}, False, "wait"),
        (BATTERY, {"battery_percent": 5, "charging": True}, True, "train"),
        (BATTERY, {"battery_percent": 30 + BATTERY_EASE - 0.1}, True, "wait"),
        (BATTERY, {"battery_percent": 30 + BATTERY_EASE}, True, "train"),
        ({"battery_floor": 98}, {"battery_percent": 99}, True, "wait"),
        ({"battery_floor": 98}, {"battery_percent": 100}, True, "train"),
        (MEMORY, {"available_bytes": GIB + 99}, False, "wait"),
        (MEMORY, {"available_bytes": GIB + 100}, False, "train"),
        (MEMORY, {"available_bytes": ENOUGH - 1}, True, "wait"),
        (MEMORY, {"available_bytes": ENOUGH + 1}, True, "train"),
        (IDLE, {"idle_seconds": IDLE_SECONDS, "load": 0.1}, False, "train"),
        (IDLE, {"idle_seconds": IDLE_SECONDS - 1, "load": 0.1}, False, "wait"),
        (IDLE, {"idle_seconds": None, "load": 0.1}, False, "train"),
        (IDLE, {"idle_seconds": None, "load": 0.5}, False, "wait"),
        (IDLE, {"idle_seconds": 1e5, "load": 0.5}, False, "wait"),
        (IDLE, {"idle_seconds": 1e5, "load": 0.4}, False, "train"),
        (IDLE, {"idle_seconds": 1e5, "load": 0.4}, True, "wait"),
        (IDLE, {"idle_seconds": 1e5, "load": 0.3}, True, "train"),
    ],
)
def test_a_rule_holds_at_its_threshold_and_lets_go_beyond_it(rule, readings, held, action):
    last = Decision("wait", held=tuple(rule)) if held else None
    assert decide(Rules(**rule), at_noon(**readings), 0, last, needed_bytes=100).action == action
    assert decide(Rules(), at_noon(**readings), 0, last, needed_bytes=100).action == "train"


def test_a_device_that_warms_up_rests_then_waits_and_comes_back_later():
    rules = Rules(temperature_ceiling=80)
    last = None
    for action, rests in (
        ("train", {60: 0}),
        ("slow", {72: 1, 76: 2, 78: 4, 79: 8, 79.5: 8}),
        ("wait", {80: 0, 79: 0, 76: 0, 75.1: 0}),
        ("slow", {75: 1.6, 72: 1}),
        ("train", {71.9: 0, 60: 0}),
    ):
        for temperature, rest in rests.items():
            last = decide(rules, at_noon(temperature=temperature, temperature_sensor="tj-thermal"), 0, last)
            assert (last.action, last.rest) == (action, rest), temperature


def test_until_is_the_last_of_the_known_ends_and_unknown_if_one_is():
    hours = (QuietHours(start="22:00", end="06:00"),)
    both = decide(Rules(hours=hours, daily_minutes=30), at_noon(), 30)
    assert both.until == datetime(2026, 11, 22, 0, tzinfo=ZONE)
    rules = Rules(hours=hours, charging=True)
    assert decide(rules, at_noon(charging=True), 0).until == datetime(2026, 11, 21, 22, tzinfo=ZONE)
    assert decide(rules, at_noon(charging=False), 0).until is None


@given(st.lists(intervals, min_size=1, max_size=3, unique=True).map(tuple), st.integers(0, 1439))
def test_hours_open_at_the_first_minute_that_lies_in_all_of_them(hours, minute):
    at = datetime.combine(NOON.date(), time(minute // 60, minute % 60), ZONE)
    decision = decide(Rules(hours=hours), Readings(at=at), 0)

    def is_open(moment):
        now = moment.time()
        return all(s.start <= now < s.end if s.start < s.end else not s.end <= now < s.start for s in hours)

    open_minutes = [at + timedelta(minutes=ahead) for ahead in range(1440) if is_open(at + timedelta(minutes=ahead))]
    if open_minutes[:1] == [at]:
        assert decision.action == "train"
    else:
        assert (decision.action, decision.until) == ("wait", open_minutes[0] if open_minutes else None)


def test_transfers_keep_off_a_metered_network():
    kept_off = decide_transfer(Rules(metered=False), at_noon(metered=True))
    assert kept_off.action == "wait"
    assert kept_off.why.startswith("the network is metered")
    for rules, metered in ((Rules(metered=False), False), (Rules(metered=False), None), (Rules(), True)):
        assert decide_transfer(rules, at_noon(metered=metered)).action == "train"
    assert decide(Rules(metered=False), at_noon(metered=True), 0).action == "train"
    assert decide(Rules(metered=False), at_noon(), 0).unknown == ("metered",)


@given(any_rules, any_rules, any_readings, minutes, any_last, needs)
def test_the_strictest_rules_allow_nothing_that_either_refuses(first, second, readings, spent, last, needed):
    both = decide(first.strictest(second), readings, spent, last, needed_bytes=needed)
    for rules in (first, second):
        alone = decide(rules, readings, spent, last, needed_bytes=needed)
        assert set(both.held) >= set(alone.held)
        assert holding(both) >= holding(alone)
        if decide_transfer(rules, readings).action == "wait":
            assert decide_transfer(first.strictest(second), readings).action == "wait"


VALUES = {"temperature": st.floats(-20, 120), "battery_percent": st.floats(0, 100)}


@pytest.mark.parametrize(("field", "sign"), [("temperature", 1), ("battery_percent", -1)])
@given(any_rules, any_readings, minutes, any_last, needs, st.data())
def test_a_better_reading_never_holds_back_more(field, sign, rules, readings, spent, last, needed, data):
    values = sorted((data.draw(VALUES[field]) for _ in range(2)), key=lambda value: sign * value)
    better, worse = (
        decide(rules, readings.model_copy(update={field: value}), spent, last, needed_bytes=needed) for value in values
    )
    assert holding(worse) >= holding(better)


@given(any_rules, any_readings, any_readings, minutes, minutes, needs)
def test_a_reason_for_the_server_does_not_depend_on_what_was_measured(
    rules, first, second, first_minutes, second_minutes, needed
):
    second = second.model_copy(update={"at": first.at})
    one = decide(rules, first, first_minutes, needed_bytes=needed)
    other = decide(rules, second, second_minutes, needed_bytes=needed)
    # `idle` has two reasons: a person, and other programs.
    if (one.action, one.held) == (other.action, other.held) and "idle" not in one.held:
        assert one.why == other.why


@given(any_rules, any_readings, minutes, any_last, needs)
def test_every_decision_explains_itself_and_can_be_kept(rules, readings, spent, last, needed):
    decision = decide(rules, readings, spent, last, needed_bytes=needed)
    assert (decision.why is None) == (decision.action == "train")
    assert Progress(phase="waiting", why=decision.why).why == decision.why
    assert (decision.action == "wait") == bool(decision.held)
    assert (decision.action == "slow") == (decision.rest > 0)
    assert decision.until is None or decision.until > readings.at
    assert not set(decision.held) & set(decision.unknown) - {"idle"}  # busy processors hold it where touch is unknown
