"""The parameters of a masked round: range of the sum, thresholds and context."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.federation.secure_aggregation.settings import SecureAggregationParameters, SecureAggregationSettings


def parameters(**changes):
    return SecureAggregationParameters(
        **{
            "cohort": "readers",
            "round": 3,
            "start_sha256": None,
            "recipe_id": "0" * 64,
            "size": 10,
            "clip": 1.0,
            "most_members": 16,
            "minimum": 3,
            "threshold": "two-thirds",
            "bits": 32,
        }
        | changes
    )


@given(
    clip=st.floats(1e-6, 1e6),
    most_weight=st.integers(1, 2**24 - 1),
    most_members=st.integers(3, 1024),
    bits=st.sampled_from([32, 64]),
)
def test_the_scale_leaves_room_for_every_sum(clip, most_weight, most_members, bits):
    try:
        round_parameters = parameters(clip=clip, most_weight=most_weight, most_members=most_members, bits=bits)
    except ValidationError:
        assert bits == 32
        return
    largest = Fraction(round_parameters.scale) * most_weight * Fraction(clip) + Fraction(1, 2)
    assert most_members * largest <= 2 ** (bits - 1) - 1
    # A scale four times as large would overflow, so at most two bits are unused.
    assert most_members * (4 * largest) > 2 ** (bits - 1) - 1
    assert most_members * most_weight <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize(("members", "majority", "two_thirds"), [(3, 3, 3), (4, 3, 3), (5, 3, 4), (16, 9, 11)])
def test_thresholds(members, majority, two_thirds):
    assert parameters(threshold="majority").required_devices(members) == majority
    assert parameters().required_devices(members) == two_thirds
    assert parameters(minimum=members).required_devices(members) == members


def test_any_other_parameter_is_another_context():
    default = parameters()
    assert parameters().context == default.context
    changes = {"cohort": "others", "round": 4, "start_sha256": "1" * 64, "size": 11, "clip": 2.0, "minimum": 4}
    changes |= {"threshold": "majority", "bits": 64, "most_members": 17, "most_weight": 2, "recipe_id": "1" * 64}
    contexts = {parameters(**{name: value}).context for name, value in changes.items()}
    assert len(contexts | {default.context}) == len(changes) + 1


def test_32_bits_that_cannot_hold_the_weights_are_refused_with_the_remedy():
    with pytest.raises(ValidationError, match="64 bits"):
        parameters(most_weight=100_000, most_members=256)
    assert parameters(most_weight=100_000, most_members=256, bits=64).scale > 1


def test_fewer_than_three_are_no_sum():
    with pytest.raises(ValidationError):
        SecureAggregationSettings(minimum=2)
    with pytest.raises(ValidationError, match="minimum"):
        SecureAggregationSettings(minimum=20, most_members=10)
