"""Encodings add up exactly, do not overflow at the bounds, and decode to the mean within the stated error."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvalidUpload
from shared.federation.secure_aggregation.fixed_point import clip_to_norm, decode, encode, mean_error
from tests.shared.federation.secure_aggregation.test_settings import parameters

BITS = st.sampled_from([32, 64])


def exact_mean(updates, weights, clip):
    """Returns the exact weighted mean of the clipped updates, as fractions."""
    rows = [[Fraction(float(value)) for value in clip_to_norm(update, clip)] for update in updates]
    total = sum(weights)
    return [
        sum(weight * row[column] for weight, row in zip(weights, rows, strict=True)) / total
        for column in range(len(rows[0]))
    ]


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(3, 16), bits=BITS, clip=st.sampled_from([1e-3, 0.7, 1.0, 37.0])
)
def test_the_decoded_mean_is_the_true_one_within_the_bound(seed, count, bits, clip):
    chance = np.random.default_rng(seed)
    round_parameters = parameters(size=7, bits=bits, clip=clip, most_weight=50)
    updates = [(chance.standard_normal(7) * clip).astype(np.float32) for _ in range(count)]
    weights = [int(weight) for weight in chance.integers(1, 51, count)]
    total = sum(
        (encode(u, w, round_parameters) for u, w in zip(updates, weights, strict=True)), np.zeros(8, f"<u{bits // 8}")
    )
    decoded = decode(total, count, round_parameters)
    assert (decoded.weight, decoded.count) == (sum(weights), count)
    bound = Fraction(mean_error(count, decoded.weight, round_parameters))
    for value, true in zip(decoded.mean, exact_mean(updates, weights, clip), strict=True):
        # float64 rounds the integer sum and the quotient once each.
        assert abs(Fraction(float(value)) - true) <= bound + 3 * abs(true) * Fraction(1, 2**52)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("clip", [1.0, 0.1, 3.3, 1e-4, 1e4])
@pytest.mark.parametrize("members", [3, 16, 1000, 1024])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_updates_of_the_most_devices_do_not_overflow(bits, clip, members, sign):
    weight = 1 if bits == 32 else 2**24 - 1
    round_parameters = parameters(size=1, bits=bits, clip=clip, most_weight=weight, most_members=members)
    one = encode(np.array([sign * 3e38], np.float32), weight, round_parameters)
    total = one * np.array(members, one.dtype)  # modulo 2^bits, as sums are
    signed = int(one.view(f"<i{bits // 8}")[0])
    assert int(total.view(f"<i{bits // 8}")[0]) == members * signed
    assert math.isclose(decode(total, members, round_parameters).mean[0], sign * clip, rel_tol=1e-3)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.floats(1e-20, 1e20))
def test_a_clipped_update_is_never_over_the_bound(values, bound):
    clipped = clip_to_norm(np.array(values, np.float32), bound)
    assert sum(Fraction(float(value)) ** 2 for value in clipped) <= Fraction(bound) ** 2 * (1 + Fraction(1, 2**50))
    assert all(abs(Fraction(float(value))) <= Fraction(bound) for value in clipped)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_is_refused(value):
    with pytest.raises(InvalidUpload, match="finite"):
        encode(np.array([value] * 10, np.float32), 1, parameters())


@pytest.mark.parametrize("weight", [0, -1, 3])
def test_a_weight_outside_the_rounds_is_refused(weight):
    with pytest.raises(InvalidUpload, match="weight of an update"):
        encode(np.zeros(10, np.float32), weight, parameters(most_weight=2))


def test_another_size_is_refused():
    with pytest.raises(InvalidUpload, match="shape"):
        encode(np.zeros(9, np.float32), 1, parameters())


@pytest.mark.parametrize("weight", [0, 2, 7, 2**31, 2**32 - 1])
def test_a_sum_with_impossible_weights_is_rejected(weight):
    total = np.zeros(11, "<u4")
    total[-1] = weight
    with pytest.raises(InvalidUpload, match="weights"):
        decode(total, 3, parameters(most_weight=2))
