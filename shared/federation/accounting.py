"""Privacy accounting: epsilon of runs and rounds, by the privacy loss distributions of `dp-accounting`.

The package is imported on first use, because it needs 100 MB of memory with SciPy.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from shared.errors import InvalidRequest, ToolchainMissing
from shared.privacy import MAX_NOISE, ExamplePrivacy, MemberPrivacy

LOSS_INTERVAL = 1e-3  # grid of the privacy losses; it overestimated epsilon by at most 0.1 % in our tests
# Above this epsilon the looser Renyi bound is used, because the exact method would need minutes and gigabytes.
MAX_EPSILON = 60.0
MAX_KNOWN = 256  # results that a process keeps
MIN_NOISE = 0.3
NOISE_STEP = 1e-3  # resolution of the noise multiplier


class Spending(BaseModel):
    """A mechanism applied `times` times: noise of `noise_multiplier` on sums over samples of `sampling_rate`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sampling_rate: float = Field(gt=0, le=1)
    noise_multiplier: float = Field(gt=0)
    times: int = Field(ge=1, description="steps of a run, or rounds of a cohort")


def run_spending(privacy: ExamplePrivacy, steps: int) -> Spending:
    """Returns the spending of a run with this many steps."""
    return Spending(sampling_rate=privacy.sampling_rate, noise_multiplier=privacy.sigma, times=steps)


def rounds_spending(privacy: MemberPrivacy, rounds: int) -> Spending:
    """Returns the spending of rounds on a member whose update is in each of them. Membership itself is not secret."""
    return Spending(sampling_rate=1, noise_multiplier=privacy.noise_multiplier, times=rounds)


Times = tuple[tuple[tuple[float, float], int], ...]  # (sampling rate, noise multiplier), times
_KNOWN: dict[tuple[Times, float], float] = {}  # by times and delta, oldest first


def epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Returns epsilon at `delta` of all spendings together under adaptive composition; 0 for none.

    The result is an upper bound. Above MAX_EPSILON it is the looser Renyi bound. Neighbours differ in one example, or
    in one member's updates. Raises ToolchainMissing without dp-accounting.
    """
    times = _count_times(spendings)
    if not times:
        return 0.0
    epsilon = _KNOWN[times, delta] = _epsilon(times, delta)
    while len(_KNOWN) > MAX_KNOWN:
        _KNOWN.pop(next(iter(_KNOWN)), None)
    return epsilon


def fast_epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Returns a looser upper bound than `epsilon_of`, by Renyi differential privacy, in milliseconds; 0 for none.

    Raises ToolchainMissing without dp-accounting.
    """
    times = _count_times(spendings)
    return _renyi(times, delta) if times else 0.0


def known_epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Returns `epsilon_of` if this process computed it recently, otherwise the looser `fast_epsilon_of`.

    For transactions, which must not wait for seconds. Raises ToolchainMissing without dp-accounting.
    """
    times = _count_times(spendings)
    if not times:
        return 0.0
    bound = _KNOWN.get((times, delta))
    return _renyi(times, delta) if bound is None else bound


def _count_times(spendings: Iterable[Spending]) -> Times:
    times: Counter[tuple[float, float]] = Counter()
    for spending in spendings:
        times[spending.sampling_rate, spending.noise_multiplier] += spending.times
    return tuple(sorted(times.items()))


def noise_for(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    """Returns the smallest noise multiplier, to three decimals, with which a run costs at most `epsilon`.

    Raises InvalidRequest if MAX_NOISE is not sufficient, ToolchainMissing without dp-accounting.
    """
    return _noise_for(epsilon, delta, sampling_rate, steps)


@lru_cache(maxsize=256)
def _noise_for(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    # In units of NOISE_STEP; the answer is in [low, high].
    low, high = round(MIN_NOISE / NOISE_STEP), round(MAX_NOISE / NOISE_STEP)

    def is_enough(units: int) -> bool:
        spending = Spending(sampling_rate=sampling_rate, noise_multiplier=units * NOISE_STEP, times=steps)
        return epsilon_of([spending], delta) <= epsilon

    probe = round(1 / NOISE_STEP)
    while probe < high and not is_enough(probe):  # from 1 upwards: little noise takes long to account for
        low, probe = probe + 1, min(2 * probe, high)
    if probe == high and not is_enough(high):
        raise InvalidRequest(
            f"epsilon {epsilon:g} at delta {delta:g} requires a noise multiplier above {MAX_NOISE:g} for {steps} "
            f"steps at sampling rate {sampling_rate:g}; use fewer steps, a lower rate, or a larger epsilon"
        )
    high = probe
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle + 1, high)
    return round(low * NOISE_STEP, 3)


@lru_cache(maxsize=256)
def _epsilon(times: Times, delta: float) -> float:
    bound = _renyi(times, delta)
    if bound > MAX_EPSILON:
        return bound
    accounting = _import_dp_accounting()
    return min(
        bound,
        _compose(accounting, accounting.pld.PLDAccountant(value_discretization_interval=LOSS_INTERVAL), times, delta),
    )


@lru_cache(maxsize=256)
def _renyi(times: Times, delta: float) -> float:
    accounting = _import_dp_accounting()
    return _compose(accounting, accounting.rdp.RdpAccountant(), times, delta)


def _compose(accounting: Any, accountant: Any, times: Times, delta: float) -> float:
    for (rate, noise), count in times:
        event = accounting.GaussianDpEvent(noise)
        accountant.compose(event if rate == 1 else accounting.PoissonSampledDpEvent(rate, event), count)
    return float(accountant.get_epsilon(delta))


def _import_dp_accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ToolchainMissing(
            "privacy accounting requires dp-accounting, which is not installed: pip install 'mobizo[privacy]'"
        ) from error
    # It warns about omitted orders, which only make its bound larger.
    logging.getLogger("absl").setLevel(logging.ERROR)
    return dp_accounting
