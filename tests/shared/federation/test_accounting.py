"""Epsilon against the accountant, a closed form, and invariants."""

import math

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy.stats import norm

from shared.errors import InvalidRequest
from shared.federation.accounting import (
    Spending,
    epsilon_of,
    fast_epsilon_of,
    known_epsilon_of,
    noise_for,
)

DELTA = 1e-5


def run(rate, noise, times):
    return Spending(sampling_rate=rate, noise_multiplier=noise, times=times)


def delta_of_gaussian(epsilon, noise):
    """Balle and Wang, ICML 2018, Theorem 8, for sensitivity 1."""
    return norm.cdf(0.5 / noise - epsilon * noise) - math.exp(epsilon) * norm.cdf(-0.5 / noise - epsilon * noise)


@pytest.mark.parametrize(("rate", "noise", "times"), [(0.02, 1.0, 150), (0.01, 0.6, 300), (0.3, 2.0, 40)])
def test_epsilon_is_at_least_the_accountants_value(rate, noise, times):
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(SelfComposedDpEvent(PoissonSampledDpEvent(rate, GaussianDpEvent(noise)), times))
    exact = accountant.get_epsilon(DELTA)
    assert exact - 1e-4 <= epsilon_of([run(rate, noise, times)], DELTA) <= exact * 1.002


@pytest.mark.parametrize(("noise", "times"), [(2.0, 1), (4.0, 9), (10.0, 100)])
def test_without_sampling_it_is_the_gaussian_mechanisms_closed_form(noise, times):
    epsilon = epsilon_of([run(1.0, noise, times)], DELTA)
    assert delta_of_gaussian(epsilon, noise / math.sqrt(times)) <= DELTA
    assert delta_of_gaussian(epsilon - 0.01, noise / math.sqrt(times)) > DELTA


def test_composition_does_not_depend_on_order_or_on_how_runs_are_cut():
    parts = [run(0.02, 1.0, 50), run(0.05, 2.0, 30), run(0.02, 1.0, 100)]
    merged = [run(0.05, 2.0, 30), run(0.02, 1.0, 150)]
    assert epsilon_of(parts, DELTA) == epsilon_of(merged, DELTA)
    assert epsilon_of(merged, DELTA) > max(epsilon_of([part], DELTA) for part in merged)
    assert epsilon_of([], DELTA) == 0.0


def test_the_noise_for_an_epsilon_is_enough_and_the_least():
    noise = noise_for(3.0, DELTA, 0.02, 150)
    assert epsilon_of([run(0.02, noise, 150)], DELTA) <= 3.0 < epsilon_of([run(0.02, noise - 0.001, 150)], DELTA)
    with pytest.raises(InvalidRequest, match="larger epsilon"):
        noise_for(1e-4, DELTA, 1.0, 1000)


def test_huge_epsilons_are_computed_quickly():
    """A request may state a million steps with little noise, for which the exact method would take minutes."""
    for spending in (run(1.0, 0.3, 10**6), run(0.5, 0.3, 10**6), run(1.0, 64.0, 10**6)):
        assert 60 < epsilon_of([spending], DELTA) < math.inf


def test_a_transaction_gets_the_exact_value_once_it_is_known():
    spendings = [run(0.0213, 1.7, 97)]
    bound = fast_epsilon_of(spendings, DELTA)
    assert known_epsilon_of(spendings, DELTA) == bound
    exact = epsilon_of(spendings, DELTA)
    assert exact < bound
    assert known_epsilon_of(spendings, DELTA) == exact
    assert known_epsilon_of([], DELTA) == 0
