"""Both halves of each algorithm, against the papers' formulas."""

import numpy as np
import pytest

from shared.federation.algorithms import DeviceAlgorithm, algorithm_of
from shared.federation.cohort import AlgorithmSettings
from shared.zo.proximal import proximal_step


def vectors(size=50, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, size)).astype(np.float32)


@pytest.mark.parametrize("name", ["fedavg", "fedprox"])
def test_synchronous_rounds_have_one_start_and_end_when_all_answered(name):
    server = algorithm_of(AlgorithmSettings(name=name, mu=0.1)).server
    assert [server.accepts(staleness) for staleness in (0, 1, 5)] == [True, False, False]
    assert server.scale(0) == 1
    assert [server.is_complete(updates, members=4) for updates in (0, 3, 4)] == [False, False, True]


def test_fedbuff_accepts_any_staleness_and_completes_with_k_updates():
    server = algorithm_of(AlgorithmSettings(name="fedbuff", buffer_size=3, staleness_exponent=0.5)).server
    assert all(server.accepts(staleness) for staleness in (0, 1, 100))
    assert [server.scale(staleness) for staleness in (0, 3, 8)] == [1, 1 / 2, 1 / 3]
    assert [server.is_complete(updates, members=100) for updates in (2, 3)] == [False, True]


def test_pulling_is_gradient_descent_on_the_proximal_term():
    """Pulls equal gradient steps in float64 along mu (B - B0), which FedProx adds."""
    start, flat = vectors()
    lrs, mu = [0.1, 0.05, 0.025, 0.0], 0.7
    expected = flat.astype(np.float64)
    for lr in lrs:
        expected -= lr * mu * (expected - start)
    factor = algorithm_of(AlgorithmSettings(name="fedprox", mu=mu)).device.proximal_factor(lrs)
    pulled = proximal_step(flat, start, factor)
    assert pulled.dtype == np.float32
    assert np.allclose(pulled, expected, rtol=0, atol=1e-6)


def test_a_full_pull_gives_the_start_and_more_is_rejected():
    start, flat = vectors()
    assert proximal_step(flat, start, DeviceAlgorithm(2.0).proximal_factor([0.5])).tobytes() == start.tobytes()
    with pytest.raises(ValueError, match=r"lr \* mu"):
        DeviceAlgorithm(2.0).proximal_factor([0.1, 0.6])
