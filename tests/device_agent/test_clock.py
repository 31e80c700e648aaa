"""The server's clock as its answers tell it, whatever the device's own does."""

from datetime import UTC, datetime, timedelta

import pytest

from device_agent.clock import ServerClock

AT = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
DATE = "Sun, 01 Mar 2026 12:00:00 GMT"


class Watch:
    """A device's two clocks, set by hand."""

    def __init__(self, local):
        self.seconds, self.local = 0.0, local

    def clock(self):
        return ServerClock(lambda: self.seconds, lambda: self.local)


def test_before_any_answer_there_is_only_its_own_clock():
    watch = Watch(AT)
    clock = watch.clock()
    assert clock.now() == AT
    assert clock.skew is None


@pytest.mark.parametrize("hours", [-30, 0, 30])
def test_the_servers_time_goes_on_from_its_last_answer(hours):
    watch = Watch(AT + timedelta(hours=hours))
    clock = watch.clock()
    clock.hear(DATE)
    assert clock.skew == hours * 3600
    watch.seconds += 90
    watch.local -= timedelta(days=365)  # somebody sets it, which changes nothing
    assert clock.now() == AT + timedelta(seconds=90)
    assert clock.left(AT + timedelta(seconds=100)) == 10


@pytest.mark.parametrize("date", [None, "", "yesterday", "Sun, 99 Mar 2026 12:00:00 GMT"])
def test_a_date_that_is_none_tells_nothing(date):
    clock = Watch(AT).clock()
    clock.hear(date)
    assert clock.skew is None


def test_a_date_without_a_zone_is_utc():
    clock = Watch(AT).clock()
    clock.hear("Sun, 01 Mar 2026 12:00:00 -0000")
    assert clock.now() == AT
