"""Aggregation with a cohort's settings, against NumPy on all updates at once."""

import os

import numpy as np
import pytest

from shared.federation.aggregation import aggregate
from shared.federation.cohort import CohortSettings
from shared.federation.sources import MemorySource
from shared.federation.update import Update

COUNT, SIZE = 7, 40_000
VALUES = np.random.default_rng(0).normal(size=(COUNT, SIZE)).astype(np.float32)
EXAMPLES = np.array([0, 5, 9, 10, 11, 80, 10**6])  # a device that claims none counts as one
STALENESS = np.array([0, 1, 2, 3, 4, 0, 8])


def cohort(**settings):
    return CohortSettings(name="c", base="b", task="sst2", dataset="d", **settings)


def source():
    claims = zip(VALUES, EXAMPLES, STALENESS, strict=True)
    return MemorySource(
        [
            Update(f"m{number}", row, int(examples), int(staleness))
            for number, (row, examples, staleness) in enumerate(claims)
        ]
    )


def test_examples_are_capped_and_staleness_and_clipping_do_not_change_the_divisor():
    settings = cohort(
        algorithm={"name": "fedbuff", "buffer_size": 7, "staleness_exponent": 0.7},
        aggregator={"clip_norm": 200.12},
        weights="examples",
        most_examples=10,
    )
    wide = VALUES.astype(np.float64)
    norms = np.sqrt((wide**2).sum(axis=1))
    assert 0 < (norms > 200.12).sum() < COUNT
    weights = np.clip(EXAMPLES, 1, 10)
    scales = (1 + STALENESS) ** -0.7 * np.minimum(1, 200.12 / norms)
    result = aggregate(settings, source())
    assert np.allclose(result.update, (weights * scales) @ wide / weights.sum(), rtol=0, atol=1e-5)
    assert (result.count, result.weight, result.clipped) == (COUNT, weights.sum(), (norms > 200.12).sum())


def test_private_members_are_clipped_and_noised():
    """The same noise at two scales separates the noise from the mean."""
    clip = 100.0
    wide = VALUES.astype(np.float64)
    clipped = (wide * clip / np.sqrt((wide**2).sum(axis=1))[:, None]).mean(axis=0)

    def result(sigma, entropy):
        privacy = {"members": {"clip": clip, "noise_multiplier": sigma, "delta": 1e-5}}
        return aggregate(cohort(privacy=privacy), source(), entropy=entropy)

    one, two = (result(sigma, np.random.default_rng(3).bytes) for sigma in (1.0, 2.0))
    assert one.clipped == COUNT
    assert np.allclose(2 * one.update.astype(np.float64) - two.update, clipped, rtol=0, atol=1e-4)
    # Of 40,000 normal numbers the deviation is known to a third of a percent: 3 % is nine times that.
    assert np.std(two.update - one.update) == pytest.approx(clip / COUNT, rel=0.03)
    assert (result(1.0, os.urandom).update != result(1.0, os.urandom).update).mean() > 0.9
