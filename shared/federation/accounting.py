"""Privacy accounting: epsilon of runs and rounds, by the privacy loss distributions of `dp-accounting`.

The package is imported on first use, because it needs 100 MB of memory with SciPy. As a program,
`python -m shared.federation.accounting` answers `AccountingRequest`s on standard input, one a line, within limits of
processor time and memory, so that servers and devices can end a computation that takes long.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from functools import lru_cache
from math import exp, log
from typing import Any

from pydantic import Field

from shared.errors import InvalidRequest, MobizoError, ToolchainMissing
from shared.privacy import MAX_NOISE, ExamplePrivacy, MemberPrivacy
from shared.strict_model import StrictModel

LOSS_INTERVAL = 1e-3  # grid of the privacy losses; it overestimated epsilon by at most 0.1 % in our tests
# Above this epsilon the looser Renyi bound is used, because the exact method would need minutes and gigabytes.
MAX_EPSILON = 60.0
MAX_KNOWN = 256  # results that a process keeps
MIN_NOISE = 0.3
NOISE_STEP = 1e-3  # resolution of the noise multiplier
MAX_INTERPOLATIONS, MIN_SLOPE = 8, -0.1
MAX_SECONDS = 120  # of processor time of the program
MAX_BYTES = 2 << 30  # of memory of the program
NICENESS = 19  # of the program: the server, which may share the processor, goes first


class Spending(StrictModel):
    """A mechanism applied `times` times: noise of `noise_multiplier` on sums over samples of `sampling_rate`."""

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
_KNOWN: dict[tuple[Any, ...], float] = {}  # by the key of a request, oldest first


class AccountingRequest(StrictModel):
    """Asks for epsilon at `delta` of spendings, or for the least noise of a run that costs at most `epsilon`."""

    delta: float
    spendings: tuple[Spending, ...] = ()
    epsilon: float | None = Field(None, description="of the run; null: of the spendings, which is the answer")
    sampling_rate: float = 1
    steps: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns what requests with the same answer have in common."""
        if self.epsilon is None:
            return _count_times(self.spendings), self.delta
        return self.epsilon, self.delta, self.sampling_rate, self.steps

    def answer(self) -> float:
        """Returns the exact answer, computed in this process unless it is known."""
        if self.epsilon is None:
            return epsilon_of(self.spendings, self.delta)
        return noise_for(self.epsilon, self.delta, self.sampling_rate, self.steps)


class NotAccounted(Exception):
    """An exact answer is not known in this process."""

    def __init__(self, request: AccountingRequest) -> None:
        self.request = request
        super().__init__()


def known_answer(request: AccountingRequest) -> float:
    """Returns the exact answer if this process knows it. Raises NotAccounted."""
    if request.epsilon is None and not request.spendings:
        return 0.0
    if request.key not in _KNOWN:
        raise NotAccounted(request)
    return _KNOWN[request.key]


def exact_epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Returns `epsilon_of` if this process knows it. Raises NotAccounted."""
    return known_answer(AccountingRequest(spendings=tuple(spendings), delta=delta))


def remember(key: tuple[Any, ...], answer: float) -> float:
    """Keeps an answer by the key of its request, and returns it."""
    _KNOWN[key] = answer
    while len(_KNOWN) > MAX_KNOWN:
        _KNOWN.pop(next(iter(_KNOWN)), None)
    return answer


def epsilon_of(spendings: Iterable[Spending], delta: float) -> float:
    """Returns epsilon at `delta` of all spendings together under adaptive composition; 0 for none.

    The result is an upper bound. Above MAX_EPSILON it is the looser Renyi bound. Neighbours differ in one example, or
    in one member's updates. Raises ToolchainMissing without dp-accounting.
    """
    times = _count_times(spendings)
    known = _KNOWN.get((times, delta)) if times else 0.0
    return remember((times, delta), _epsilon(times, delta)) if known is None else known


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
    key = epsilon, delta, sampling_rate, steps
    return _KNOWN[key] if key in _KNOWN else remember(key, _find_noise(*key))


def _find_noise(epsilon: float, delta: float, sampling_rate: float, steps: int) -> float:
    # In units of NOISE_STEP; the answer is in [low, high].
    low, high = round(MIN_NOISE / NOISE_STEP), round(MAX_NOISE / NOISE_STEP)

    def cost(units: int, accountant: Callable[[Times, float], float]) -> float:
        return accountant((((sampling_rate, units * NOISE_STEP), steps),), delta)

    # The fast bound gives a noise that is enough, and where to begin.
    probe = round(1 / NOISE_STEP)
    while probe < high and cost(probe, _renyi) > epsilon:
        probe = min(2 * probe, high)
    if cost(probe, _epsilon) <= epsilon:
        high = probe
    elif probe == high:
        raise InvalidRequest(
            f"epsilon {epsilon:g} at delta {delta:g} requires a noise multiplier above {MAX_NOISE:g} for {steps} "
            f"steps at sampling rate {sampling_rate:g}; use fewer steps, a lower rate, or a larger epsilon"
        )
    slope, last = -1.5, (log(probe), log(cost(probe, _epsilon)))  # epsilon falls about as a power of the noise
    tries = 0
    while low < high:
        tries += 1
        aim = round(exp(min(last[0] + (log(epsilon) - last[1]) / slope, log(high))))
        # What the interpolation does not find soon, bisection does.
        probe = min(max(aim, low), high - 1) if tries <= MAX_INTERPOLATIONS else (low + high) // 2
        found = cost(probe, _epsilon)
        low, high = (low, probe) if found <= epsilon else (probe + 1, high)
        here = log(probe), log(found)
        if here[0] != last[0] and here[1] != last[1]:
            slope = min((here[1] - last[1]) / (here[0] - last[0]), MIN_SLOPE)
        last = here
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


def main() -> None:
    """Answers requests, one a line, by {"answer"} or by the problem of what it is refused with."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"answer": AccountingRequest.model_validate_json(line).answer()}
        except MobizoError as error:
            answer = {"problem": error.problem()}
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
