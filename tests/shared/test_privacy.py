"""The NumPy reference of the privacy mechanism: bounds for any floats, distribution of the noise, private mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, norm

from shared.entropy import gaussian, poisson_samples, rounded_gaussian, uniform
from shared.federation.aggregation import Weighting, combine_privately
from shared.federation.sources import MemorySource
from shared.federation.update import Update
from shared.privacy import UNITS, ExamplePrivacy, MemberPrivacy, contributions, noised_mean, unit_noise


def seeded(seed):
    """Returns a reproducible source of bytes."""
    return np.random.default_rng(seed).bytes


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=5), st.floats(1e-6, 1e3))
def test_an_example_adds_at_most_c_whatever_its_losses_are(differences, clip):
    units = contributions(np.array(differences, np.float32), clip)
    assert (np.square(units).sum(axis=1) <= UNITS**2).all()


def test_small_differences_are_not_clipped():
    differences = np.array([[0.01, -0.02], [3.0, 4.0]], np.float32)
    units = contributions(differences, 1.0)
    np.testing.assert_allclose(units[0] / UNITS, differences[0], atol=1 / UNITS)
    np.testing.assert_allclose(units[1] / UNITS, [0.6, 0.8], atol=2 / UNITS)


def test_noise_is_the_rounded_normal_law():
    scale = 3.0
    samples = rounded_gaussian(scale, 200_000, seeded(1))
    edges = np.arange(-9.5, 10.5)
    counts, _ = np.histogram(samples, np.concatenate(([-np.inf], edges, [np.inf])))
    expected = np.diff(norm.cdf(np.concatenate(([-np.inf], edges, [np.inf])) / scale)) * len(samples)
    assert chisquare(counts, expected).pvalue > 1e-4


def test_uniforms_reach_the_tails_and_never_zero():
    low = uniform(4, lambda size: bytes(size))
    high = uniform(4, lambda size: b"\xff" * size)
    assert (low == 2.0**-65).all()
    assert (high == 1.0).all()
    assert np.isfinite(gaussian(4, lambda size: bytes(size))).all()
    assert np.isfinite(gaussian(4, lambda size: b"\xff" * size)).all()


def test_unit_noise_is_whole_numbers_exact_in_float32():
    noise = unit_noise(ExamplePrivacy(noise_multiplier=64, sampling_rate=1), 50, 64, seeded(2))
    assert noise.dtype == np.float32
    assert np.array_equal(noise, np.rint(noise))
    assert abs(noise.std() / (64 * UNITS) - 1) < 0.05
    assert np.abs(noise).max() < 2**22


def test_samples_are_ascending_and_each_step_has_one():
    samples = list(poisson_samples(500, 30, 0.2, seeded(3)))
    assert len(samples) == 500
    assert all((np.diff(sample) > 0).all() and (sample < 30).all() for sample in samples)
    assert [len(sample) for sample in poisson_samples(3, 4, 1.0)] == [4, 4, 4]


def source(updates):
    return MemorySource([Update(f"m{index}", np.array(flat, np.float32)) for index, flat in enumerate(updates)])


def test_the_private_mean_moves_by_no_more_than_its_noise_covers():
    """Replacing any update by zeros moves the mean before noise by at most clip / n."""
    rng = np.random.default_rng(0)
    privacy = MemberPrivacy(clip=0.7, noise_multiplier=0.3)
    updates = rng.standard_normal((6, 50)) * 10.0 ** rng.uniform(-3, 6, (6, 1))
    silent = lambda size: b"\x00" * 7 + b"\x80" + bytes(size - 8)  # noqa: E731  # its normal numbers do not matter
    mean = combine_privately(source(updates), privacy, Weighting(), entropy=silent).update.astype(np.float64)
    for member in range(6):
        changed = updates.copy()
        changed[member] = 0
        changed_mean = combine_privately(source(changed), privacy, Weighting(), entropy=silent).update.astype(
            np.float64
        )
        assert np.linalg.norm(changed_mean - mean) <= 0.7 / 6 * (1 + 1e-5)


def test_the_means_noise_is_sigma_clip_over_n():
    noised = noised_mean(np.zeros(100_000), 8, MemberPrivacy(clip=0.5, noise_multiplier=2), seeded(4))
    assert noised.std() == pytest.approx(2 * 0.5 / 8, rel=0.02)
    assert abs(noised.mean()) < 0.002


def test_a_private_mean_is_of_equal_weights():
    with pytest.raises(ValueError, match="equal weights"):
        combine_privately(
            source(np.ones((2, 3))), MemberPrivacy(clip=1, noise_multiplier=1), Weighting(weights="examples")
        )
