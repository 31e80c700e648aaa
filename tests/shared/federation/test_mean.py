"""The streaming mean against math.fsum, which rounds once."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.federation.mean import WeightedMean, error_bound

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
weights = st.integers(1, 2**31 - 1)
scales = st.floats(2.0**-20, 1.0)
terms = st.tuples(floats, weights, scales)


def exact(values):
    """Returns (mean, mean of absolute values) of (x, weight, scale). Products are exact, and each sum is rounded once.

    x has 24 bits, a weight 31 and a scale 53, so that only integer arithmetic holds their product.
    """
    parts = []
    for x, weight, scale in values:
        (xn, xd), (sn, sd) = float(x).as_integer_ratio(), scale.as_integer_ratio()
        parts.append((xn * sn * weight, xd * sd))
    common = max(d for _, d in parts)  # all are powers of two
    total = sum(n * (common // d) for n, d in parts)
    absolute = sum(abs(n) * (common // d) for n, d in parts)
    weight = sum(w for _, w, _ in values)
    return total / (common * weight), absolute / (common * weight)


def mean_of(values):
    mean = WeightedMean(1)
    for x, weight, scale in values:
        mean.add(np.array([x], np.float32), weight, scale)
    return mean


def within(computed, values):
    mean, absolute = exact(values)
    bound = error_bound(len(values), np.array([absolute]), np.array([mean]))
    return abs(float(computed[0]) - mean) <= bound[0]


@given(st.lists(terms, min_size=1, max_size=40), st.randoms())
def test_every_order_of_updates_is_within_the_error_bound(values, random):
    assert within(mean_of(values).result(), values)
    random.shuffle(values)
    assert within(mean_of(values).result(), values)


@pytest.mark.parametrize(("weight", "scale"), [(0, 1), (-1, 1), (math.inf, 1), (math.nan, 1), (1, math.nan)])
def test_invalid_weights_are_rejected(weight, scale):
    with pytest.raises(ValueError, match="do not define a mean"):
        WeightedMean(2).add(np.zeros(2, np.float32), weight, scale)
