from datetime import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.rules import QuietHours, Rules

times = st.builds(time, st.integers(0, 23), st.integers(0, 59))
intervals = st.builds(
    lambda pair: QuietHours(start=pair[0], end=pair[1]), st.tuples(times, times).filter(lambda pair: pair[0] != pair[1])
)


def maybe(low, high):
    return st.none() | st.floats(low, high)


rules = st.builds(
    Rules,
    charging=st.booleans(),
    battery_floor=maybe(0, 100),
    temperature_ceiling=maybe(1, 150),
    memory_floor_bytes=st.none() | st.integers(0, 1 << 40),
    idle=st.booleans(),
    hours=st.lists(intervals, max_size=4, unique=True).map(tuple),
    metered=st.booleans(),
    daily_minutes=maybe(0, 1440),
)


def meaning(given_rules):
    """Returns the rules with their hours as a set."""
    return given_rules.model_dump(exclude={"hours"}), set(given_rules.hours)


@pytest.mark.parametrize(
    ("start", "end", "inside", "outside"),
    [
        ("09:00", "17:30", ["09:00", "12:00", "17:29:59"], ["08:59:59", "17:30", "00:00", "23:59"]),
        ("22:00", "06:00", ["22:00", "23:59:59", "00:00", "05:59"], ["06:00", "12:00", "21:59:59"]),
        ("22:00", "00:00", ["22:00", "23:59:59"], ["00:00", "21:59"]),
        ("00:00", "06:00", ["00:00", "05:59"], ["06:00", "23:59"]),
    ],
)
def test_an_interval_includes_its_start_and_excludes_its_end(start, end, inside, outside):
    interval = QuietHours(start=start, end=end)
    assert all(interval.contains(time.fromisoformat(now)) for now in inside)
    assert not any(interval.contains(time.fromisoformat(now)) for now in outside)


@given(intervals, times)
def test_an_interval_and_its_complement_cover_the_day(interval, now):
    complement = QuietHours(start=interval.end, end=interval.start)
    assert interval.contains(now) != complement.contains(now)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [("22:00Z", "06:00", "without a zone"), ("22:00", "06:00+01:00", "without a zone"), ("06:00", "06:00", "nothing")],
)
def test_an_empty_interval_or_one_with_a_zone_is_rejected(start, end, message):
    with pytest.raises(ValidationError, match=message):
        QuietHours(start=start, end=end)


@given(rules, rules)
def test_strictest_is_commutative(first, second):
    assert meaning(first.strictest(second)) == meaning(second.strictest(first))


@given(rules, rules, rules)
def test_strictest_is_associative(first, second, third):
    assert first.strictest(second).strictest(third) == first.strictest(second.strictest(third))


@given(rules)
def test_no_rules_and_the_same_rules_change_nothing(one):
    assert one.strictest(Rules()) == Rules().strictest(one) == one.strictest(one) == one


def test_strictest_by_hand():
    night, evening = QuietHours(start="22:00", end="06:00"), QuietHours(start="18:00", end="23:00")
    mine = Rules(battery_floor=30, temperature_ceiling=80, memory_floor_bytes=5, hours=(night,), daily_minutes=60)
    yours = Rules(
        charging=True, battery_floor=50, temperature_ceiling=70, hours=(evening, night), metered=False, daily_minutes=90
    )
    assert mine.strictest(yours) == Rules(
        charging=True,
        battery_floor=50,
        temperature_ceiling=70,
        memory_floor_bytes=5,
        hours=(night, evening),
        metered=False,
        daily_minutes=60,
    )
    assert not mine.strictest(yours).idle
