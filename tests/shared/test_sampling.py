"""Tokens are drawn from logits by temperature and top-p."""

import math

import numpy as np
import pytest

from shared.errors import BadRequest
from shared.sampling import Sampler


def test_tokens_are_drawn_by_their_chances():
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(chances).astype(np.float32)

    def shares(**options):
        sampler = Sampler(**{"temperature": 1.0, "top_p": 1.0, "seed": 4} | options)
        tokens = [sampler(logits) for _ in range(4000)]
        return np.bincount(tokens, minlength=4) / len(tokens)

    np.testing.assert_allclose(shares(), chances, atol=0.03)
    hotter = chances**0.5 / (chances**0.5).sum()
    np.testing.assert_allclose(shares(temperature=2.0), hotter, atol=0.03)
    # 0.5 + 0.3 reach 0.7; the others are never drawn.
    np.testing.assert_allclose(shares(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert shares(top_p=0.5)[0] == 1
    assert shares(temperature=0)[0] == 1


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0])
def test_a_temperature_that_is_no_finite_number_from_0_is_refused(temperature):
    with pytest.raises(BadRequest, match="not a finite number of at least 0"):
        Sampler(temperature, 1.0, 0)
