"""Robust aggregators against NumPy over all updates at once, and Krum against its definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shared.federation import robust
from shared.federation.aggregation import Weighting, combine
from shared.federation.algorithms import BufferedServerAlgorithm
from shared.federation.cohort import AggregatorSettings
from shared.federation.sources import MemorySource
from shared.federation.update import Update, euclidean_norm

rows = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 13), st.integers(1, 9)),
    elements=st.floats(-1e6, 1e6, width=32),
)


def source(values, **claims):
    return MemorySource([Update(f"m{number:04}", row, **claims) for number, row in enumerate(values)])


def normal(count=9, size=500, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


@pytest.fixture
def narrow(monkeypatch):
    """Limits memory so that blocks have a few columns and Krum's tiles a few rows."""
    monkeypatch.setattr(robust, "MAX_BYTES", 1024)


@given(rows)
def test_the_median_of_each_column(values):
    expected = np.median(values.astype(np.float64), axis=0).astype(np.float32)
    assert np.array_equal(robust.median(values), expected)


@given(rows, st.sampled_from([0.0, 0.1, 0.2, 0.34, 0.49]))
def test_the_trimmed_mean_of_each_column(values, share):
    trimmed = int(len(values) * share)
    remaining = np.sort(values.astype(np.float64), axis=0)[trimmed : len(values) - trimmed]
    assert np.allclose(robust.trimmed_mean(values, share), remaining.mean(axis=0), rtol=1e-6, atol=1e-6)


def definition(values, malicious):
    """Returns the Krum scores by the definition of Blanchard et al., pair by pair."""
    scores = []
    for i, one in enumerate(values):
        others = sorted(float(((one - other) ** 2).sum()) for j, other in enumerate(values) if j != i)
        scores.append(sum(others[: len(values) - malicious - 2]))
    return scores


@pytest.mark.parametrize("malicious", [0, 1, 3])
def test_krum_scores_are_their_definition_over_blocks_and_tiles(narrow, malicious):
    values, scales = normal(), np.linspace(0.5, 1, 9)
    norms = [float(np.linalg.norm(row.astype(np.float64))) for row in values]
    result = robust.krum_scores(source(values), list(scales), norms, malicious)
    assert np.allclose(result, definition(values * scales[:, None], malicious), rtol=1e-9)


def test_krum_takes_the_best_and_multi_krum_the_best_n_minus_f_minus_2():
    values = normal()
    order = np.argsort(definition(values.astype(np.float64), 2))
    one = combine(source(values), AggregatorSettings(name="krum", krum_f=2), Weighting())
    assert one.chosen == (f"m{order[0]:04}",)
    assert one.update.tobytes() == values[order[0]].tobytes()
    many = combine(source(values), AggregatorSettings(name="multi_krum", krum_f=2), Weighting())
    assert set(many.chosen) == {f"m{index:04}" for index in order[:5]}
    assert np.allclose(many.update, values[order[:5]].mean(axis=0), atol=1e-6)


def test_krum_of_too_few_is_refused():
    with pytest.raises(ValueError, match="among at least 7, not 6"):
        combine(source(normal(6)), AggregatorSettings(name="krum", krum_f=2), Weighting())


@pytest.mark.parametrize("name", ["median", "trimmed_mean"])
def test_blocks_give_the_same_result_as_one_array(narrow, name):
    values = normal()
    result = combine(source(values), AggregatorSettings(name=name, trim_share=0.25), Weighting()).update
    rule = robust.median if name == "median" else lambda block: robust.trimmed_mean(block, 0.25)
    assert result.tobytes() == rule(values).tobytes()


@pytest.mark.parametrize("name", ["mean", "median"])
def test_clipping_scales_long_updates_down_and_leaves_short_ones(name):
    values = normal(5)
    values[1] *= 1e-3
    norms = np.linalg.norm(values.astype(np.float64), axis=1)
    limit = float(np.sort(norms)[2])
    expected = values * np.minimum(1, limit / norms)[:, None]
    result = combine(source(values), AggregatorSettings(name=name, clip_norm=limit), Weighting())
    assert result.clipped == 2
    reference = expected.mean(axis=0) if name == "mean" else np.median(expected, axis=0)
    assert np.allclose(result.update, reference, atol=1e-5)


@given(st.floats(1e-30, 1e38), st.floats(1e-6, 1e6), st.integers(0, 99))
def test_a_clipped_update_is_never_over_the_bound(scale, bound, seed):
    flat = (scale * np.random.default_rng(seed).uniform(-1, 1, 50)).astype(np.float32)
    clipped = flat.astype(np.float64) * robust.clip_scale(euclidean_norm(flat), bound)
    assert np.linalg.norm(clipped) <= bound
    assert np.linalg.norm(clipped.astype(np.float32).astype(np.float64)) <= bound


@pytest.mark.parametrize("name", ["mean", "median", "krum"])
def test_stale_updates_are_scaled_down(name):
    values = np.ones((3, 4), np.float32)
    weighting = Weighting(BufferedServerAlgorithm(exponent=0.5))
    result = combine(source(values, staleness=3), AggregatorSettings(name=name), weighting)
    assert np.array_equal(result.update, np.full(4, 0.5, np.float32))


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1.0, 1e20, 1e37])
def test_norms_of_any_scale(scale):
    flat = (scale * np.random.default_rng(0).uniform(-1, 1, 20_000)).astype(np.float32)
    expected = float(np.sqrt((flat.astype(np.longdouble) ** 2).sum()))
    assert euclidean_norm(flat) == pytest.approx(expected, rel=1e-12)
