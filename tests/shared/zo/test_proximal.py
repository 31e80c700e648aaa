"""The pull of FedProx against its definition."""

import numpy as np
import pytest

from shared.zo.proximal import pull, pull_factor


@pytest.mark.parametrize(("lr", "mu", "factor"), [(0.1, 0.5, 0.95), (0.1, 0.0, 1.0), (1.0, 1.0, 0.0)])
def test_the_factor_is_what_one_step_leaves(lr, mu, factor):
    assert pull_factor(lr, mu) == np.float32(factor)


def test_a_pull_past_the_start_is_refused():
    with pytest.raises(ValueError, match=r"lr \* mu must be at most 1"):
        pull_factor(1.1, 1.0)


def test_a_pull_is_a_gradient_step_of_the_proximal_term():
    """d/dB (mu / 2) ||B - B0||^2 = mu (B - B0), in float64."""
    rng = np.random.default_rng(0)
    start, flat = rng.normal(size=(2, 1000)).astype(np.float32)
    lr, mu = 0.01, 0.7
    expected = flat.astype(np.float64) - lr * mu * (flat.astype(np.float64) - start)
    np.testing.assert_allclose(pull(flat, start, pull_factor(lr, mu)), expected, rtol=1e-6, atol=1e-6)
