"""The server's clock as the client estimates it, and pauses between attempts."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from device_agent.protocol.client import Backoff, ServerClock

AT = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
DATE = "Sun, 01 Mar 2026 12:00:00 GMT"


@pytest.mark.parametrize("hours", [-30, 0, 30])
def test_the_servers_time_goes_on_from_its_last_answer(hours):
    watch = SimpleNamespace(seconds=0.0, local=AT + timedelta(hours=hours))  # the device's two clocks
    clock = ServerClock(lambda: watch.seconds, lambda: watch.local)
    clock.observe(DATE)
    assert clock.skew == hours * 3600
    watch.seconds += 90
    watch.local -= timedelta(days=365)  # somebody sets it, which changes nothing
    assert clock.now() == AT + timedelta(seconds=90)
    assert clock.seconds_until(AT + timedelta(seconds=100)) == 10


def test_pauses_double_to_the_longest_with_jitter_below():
    pauses = Backoff(2, 20)
    for nominal in (2, 4, 8, 16, 20, 20):
        assert nominal / 2 <= pauses.pause() <= nominal
    pauses.reset()
    assert 1 <= pauses.pause() <= 2
