"""What privacy costs: epsilon of runs and rounds, by the privacy loss distributions of `dp-accounting`.

That package (with SciPy, 100 MB of memory) is loaded when the first cost is asked for. Knows no user and no cohort.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import InvalidRequest, ToolchainMissing
from shared.privacy import MOST_NOISE, ExamplePrivacy, MemberPrivacy

INTERVAL = 1e-3  # of the privacy losses' grid; the cost is rounded up, by 0.1 % of epsilon at most in what was tried
# Of Renyi's looser bound: what costs more than that is not looked at closely, which would take minutes and gigabytes.
MOST_EPSILON = 60.0
LEAST_NOISE = 0.3
STEP = 1e-3  # of the noise multipliers that are looked at


class Spending(BaseModel):
    """One mechanism, so many times: noise of `noise_multiplier` on sums over samples of `sampling_rate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling_rate: float = Field(gt=0, le=1)
    noise_multiplier: float = Field(gt=0)
    times: int = Field(ge=1, description="steps of a run, or rounds of a cohort")


def of_run(privacy: ExamplePrivacy, steps: int) -> Spending:
    """What a run of so many steps spends."""
    return Spending(sampling_rate=privacy.sampling_rate, noise_multiplier=privacy.sigma, times=steps)


def of_rounds(privacy: MemberPrivacy, rounds: int) -> Spending:
    """What so many rounds spend on a member whose update is in each; who else takes part is nobody's secret."""
    return Spending(sampling_rate=1, noise_multiplier=privacy.noise_multiplier, times=rounds)


def epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """The epsilon at `delta` of all of it together, whatever was done in the light of what came before; 0 for nothing.

    Never less than it is; over MOST_EPSILON it is Renyi's bound, which is larger. Neighbours: one example, or one
    member's updates, more or less. Raises ToolchainMissing without dp-accounting.
    """
    times: Counter[tuple[float, float]] = Counter()
    for spending in spendings:
        times[spending.sampling_rate, spending.noise_multiplier] += spending.times
    return _epsilon(tuple(sorted(times.items())), delta) if times else 0.0


def noise_for(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """The least noise multiplier, to three places, with which a run costs at most `epsilon`.

    Raises InvalidRequest if even MOST_NOISE does not reach it, ToolchainMissing without dp-accounting.
    """
    return _noise_for(epsilon, delta, sampling_rate, steps)


@lru_cache(maxsize=256)
def _noise_for(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    low, high = round(LEAST_NOISE / STEP), round(MOST_NOISE / STEP)  # in units of STEP; the answer is in [low, high]

    def enough(units: int) -> bool:
        spending = Spending(sampling_rate=sampling_rate, noise_multiplier=units * STEP, times=steps)
        return epsilon_of([spending], delta) <= epsilon

    probe = round(1 / STEP)
    while probe < high and not enough(probe):  # from 1 upwards: little noise takes long to account for
        low, probe = probe + 1, min(2 * probe, high)
    if probe == high and not enough(high):
        raise InvalidRequest(
            f"epsilon {epsilon:g} at delta {delta:g} takes more noise than {MOST_NOISE:g} times the clip over {steps} "
            f"steps at sampling rate {sampling_rate:g}: ask for fewer steps, a lower rate, or a larger epsilon"
        )
    high = probe
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return round(low * STEP, 3)


@lru_cache(maxsize=256)
def _epsilon(times: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    accounting = _package()
    bound = _composed(accounting, accounting.rdp.RdpAccountant(), times, delta)
    if bound > MOST_EPSILON:
        return bound
    return min(
        bound,
        _composed(accounting, accounting.pld.PLDAccountant(value_discretization_interval=INTERVAL), times, delta),
    )


def _composed(
    accounting: Any, accountant: Any, times: tuple[tuple[tuple[float, float], int], ...], delta: float
) -> float:
    for (rate, noise), count in times:
        event = accounting.GaussianDpEvent(noise)
        accountant.compose(event if rate == 1 else accounting.PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta))


def _package() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ToolchainMissing(
            "privacy is accounted for by dp-accounting, which is not installed here: pip install 'mobizo[privacy]'"
        ) from error
    # It warns of orders that it leaves out, which only makes its bound larger.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting
