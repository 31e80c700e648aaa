"""Noise on counts of records."""

import math

import pytest

from device_agent.training.data import SCALE, CountNoise
from tests.device_agent.tiny import TASK


def noise_of(secret, task=TASK):
    return CountNoise(secret.hex(), task.model_dump(mode="json"))


def test_the_noise_stays_the_same_for_the_same_count_and_is_new_for_another():
    noise, other = noise_of(b"a"), TASK.model_copy(update={"name": "other"})
    assert noise.on(5, "fit", "data") == noise_of(b"a").on(5, "fit", "data") == noise.on(0, "fit", "data") + 5
    counts = [noise.on(0, "fit", str(number)) for number in range(20)]
    for changed in (noise_of(b"b"), noise_of(b"a", other)):
        assert [changed.on(0, "fit", str(number)) for number in range(20)] != counts
    assert [noise.on(0, "unusable", str(number)) for number in range(20)] != counts


@pytest.mark.parametrize("scales", [-2, -1, 0, 1, 2])
def test_the_noise_has_a_laplace_distribution(scales):
    """Its cumulative distribution, from Dwork et al. (TCC 2006), at points between two whole numbers."""
    drawn = [noise_of(b"a").on(0, "fit", number) for number in range(10_000)]
    at = scales * SCALE + 0.5
    expected = math.exp(at / SCALE) / 2 if at < 0 else 1 - math.exp(-at / SCALE) / 2
    assert abs(sum(value < at for value in drawn) / len(drawn) - expected) < 0.015


def test_one_record_changes_the_odds_of_any_answer_by_epsilon_at_most():
    drawn = [noise_of(b"a").on(0, "fit", number) for number in range(30_000)]
    for edge in (-20, -5, 0, 5, 20):
        with_it, without = (sum(count + value >= edge for value in drawn) for count in (1, 0))
        assert math.exp(-0.13) < without / with_it <= 1
