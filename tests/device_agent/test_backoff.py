"""Pauses between tries."""

import pytest

from device_agent.backoff import Backoff


def test_pauses_double_to_the_longest_with_jitter_below():
    pauses = Backoff(2, 20)
    for nominal in (2, 4, 8, 16, 20, 20):
        assert nominal / 2 <= pauses.pause() <= nominal
    pauses.reset()
    assert 1 <= pauses.pause() <= 2


@pytest.mark.parametrize("shortest", [1.0, 300.0])
def test_a_fleet_does_not_come_back_in_step(shortest):
    assert len({Backoff(shortest, shortest).pause() for _ in range(50)}) > 40
