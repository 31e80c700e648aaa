"""Differential privacy: the settings of jobs and cohorts, and a NumPy reference of the mechanism.

On a device, in each step: every example's q loss differences (of the example mean, see `shared.zo.encoding`) are
clipped together to an L2 norm of C and truncated to units of C / UNITS. The program sums them over the step's sample
and adds secret noise, also a whole number of units, to each sum. With estimator `directional` the q numbers are the
projections of the example's gradient. With estimator `gradient` they are the D elements of the gradient itself, in
units of sigma C / NOISE_UNITS, and the program draws the noise from secret keys. Nothing else of the data reaches B.
Two data sets are neighbours if one has one example more.

On a server, in each round: every member's update is clipped to an L2 norm, and noise is added to the mean. Two
histories are neighbours if they have the same members, one of whom sent zeros in every round.

DP-SGD is from Abadi et al., CCS'16. That noise on scalars is sufficient for zeroth-order steps is from Tang et al.,
"Private Fine-tuning of Large Language Models with Zeroth-order Optimization", 2024. `shared.federation.accounting`
computes the cost.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat, model_validator

from shared.entropy import Entropy, gaussian, rounded_gaussian
from shared.errors import InvalidRecipe
from shared.strict_model import StrictModel
from shared.zo.noise import direction

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]

UNITS = 1 << 12  # units per C; float32 represents the sums of MAX_SAMPLE examples and any noise exactly
DELTA = 1e-5  # default delta
MAX_DIFFERENCE = 1024.0  # times C; larger differences are clamped, so that no square overflows
MAX_NOISE = 64.0  # times C; float32 represents every whole number of units in this range
MAX_SAMPLE = 1 << 11  # examples of one step

# Of clipped gradients. int32 represents the sums of MAX_SAMPLE examples and the noise exactly, because sigma >= 0.3.
NOISE_UNITS = 1 << 18  # units per standard deviation of the noise
# The noise is the sum of this many draws, divided by its root, so that it takes far more values than one draw of 24
# random bits does, and exceeds 11 standard deviations (Holohan and Braghin, "Secure Random Sampling in Differential
# Privacy", ESORICS'21).
NOISE_KEYS = 4
MARGIN = 2.0**-13  # of the norm C, for the float32 rounding of norms and products
MAX_GRADIENT = 2.0**50  # times C; larger elements are clamped, so that no square overflows


class ExamplePrivacy(StrictModel):
    """Privacy of each example of a device's data against anyone who sees the run's B or its trajectory."""

    clip: FiniteFloat = Field(
        0.05,
        gt=0,
        le=1e3,
        description="C: the largest L2 norm of an example's q loss differences, nats (estimator replay), of its "
        "gradient in B (gradient), or of the gradient's q projections (directional). Its default is for replay; the "
        "others need a value",
    )
    noise_multiplier: FiniteFloat | None = Field(
        None,
        ge=0.3,
        le=MAX_NOISE,
        description="sigma: standard deviation of the noise divided by C; null: computed from epsilon",
    )
    epsilon: FiniteFloat | None = Field(
        None,
        gt=0,
        le=100,
        description="largest epsilon of the run; null: determined by the noise multiplier",
    )
    delta: float = Field(DELTA, gt=0, lt=1)
    sampling_rate: float = Field(
        gt=0,
        le=1,
        description="probability with which each example is in a step, independently. Best about E "
        "/ number of examples; the number "
        "is not reported. A sample of more than E examples needs another call of the program",
    )

    @model_validator(mode="after")
    def _check_noise_or_epsilon(self) -> ExamplePrivacy:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("set noise_multiplier, or epsilon to compute it")
        return self

    @property
    def sigma(self) -> float:
        """The noise multiplier. Raises ValueError if it has not been computed from epsilon yet."""
        if self.noise_multiplier is None:
            raise ValueError("the noise multiplier for this epsilon has not been computed yet")
        return self.noise_multiplier


# What C bounds with estimators that its default does not suit, and a value that suited movie reviews.
_OTHER_CLIPS = {
    "gradient": "the gradient of an example, as 10 does for movie reviews",
    "directional": "the q projections of an example's gradient, as 160 does for movie reviews with 256 queries",
}


def check_clip(privacy: ExamplePrivacy, estimator: str) -> None:
    """Raises InvalidRecipe if C is left to its default with an estimator that it does not suit."""
    if estimator in _OTHER_CLIPS and "clip" not in privacy.model_fields_set:
        raise InvalidRecipe(
            f"privacy.clip is not given, and its default of {privacy.clip:g} suits estimator 'replay' alone: give a "
            f"value that, with estimator {estimator!r}, bounds {_OTHER_CLIPS[estimator]}"
        )


class MemberPrivacy(StrictModel):
    """Privacy of each member's update against anyone who sees the cohort's versions. The server sees all updates."""

    clip: FiniteFloat = Field(gt=0, le=1e6, description="the L2 norm of a member's update")
    noise_multiplier: FiniteFloat = Field(
        ge=0.3,
        le=1e3,
        description="standard deviation of the noise in the sum of updates, divided by clip",
    )
    delta: float = Field(DELTA, gt=0, lt=1)
    epsilon: FiniteFloat | None = Field(None, gt=0, le=1e3, description="budget of all rounds together; null: no limit")


class PrivacySettings(StrictModel):
    """A cohort's privacy guarantees. examples: on each device in each round. members: in the mean of their updates."""

    examples: ExamplePrivacy | None = None
    members: MemberPrivacy | None = None

    @model_validator(mode="after")
    def _check_not_empty(self) -> PrivacySettings:
        if self.examples is None and self.members is None:
            raise ValueError("privacy needs examples, members or both; otherwise omit it")
        return self


class PrivacyBudget(StrictModel):
    """The privacy budget that an operator sets for a user's data, over all jobs."""

    epsilon: FiniteFloat | None = Field(gt=0, le=1e3, description="null: no limit")
    delta: float = Field(DELTA, gt=0, lt=1)


class UserPrivacy(StrictModel):
    """The privacy spent on a user's data."""

    user: str
    epsilon: float | None = Field(description="epsilon of all private runs, including reserved ones; null: unbounded")
    delta: float
    budget: float | None = Field(description="epsilon that may be spent; null: no limit")
    runs: int = Field(description="number of private runs, one for each device that got a job")
    unprotected: int = Field(description="number of jobs without privacy, which are not covered by epsilon")


class DatasetPrivacy(StrictModel):
    """The privacy spent on a data set of a device, whatever users the jobs named."""

    dataset: str
    users: list[str] = Field(description="users whose jobs have spent on it")
    epsilon: float | None = Field(description="epsilon of all private runs; null: unbounded")
    delta: float
    budget: float | None = Field(
        description="smallest budget of the device's users and of `users`, which no run on it may exceed; null: none"
    )
    runs: int = Field(description="number of private runs")


class CohortPrivacy(StrictModel):
    """The privacy spent by a cohort's rounds."""

    cohort: str
    rounds: int = Field(description="number of published rounds")
    members_epsilon: float | None = Field(
        description="epsilon of a member who took part in every round; null: no noise on the mean"
    )
    members_delta: float | None
    members_budget: float | None = Field(description="epsilon at which no further round opens; null: no limit")
    examples_epsilon: float | None = Field(
        description="largest epsilon of any member's examples, from this cohort's rounds only; null: not private"
    )
    examples_delta: float | None


def contributions(differences: F32, clip: float) -> I64:
    """Returns each example's contribution to the sums, in whole units, int64 (n, q).

    Each row's L2 norm is at most UNITS.

    differences: float32 (n, q), loss_plus - loss_minus of each example and query. NaN counts as zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(differences, np.float32) / np.float32(clip)
    scaled = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -MAX_DIFFERENCE, MAX_DIFFERENCE).astype(
        np.float32
    )
    norms = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True, dtype=np.float32))
    # One unit less than the bound pays for the rounding of norms and products in float32.
    factors = np.float32(UNITS - 1) / np.maximum(norms, np.float32(1))
    units: I64 = np.trunc(scaled * factors).astype(np.int64)
    return units


def coefficients_of(totals: F32, clip: float, lr: float, eps: float, batch: int) -> F32:
    """Returns the coefficients, float32 (q,), of noised totals in whole units, float32 (q,).

    batch: E, the divisor of the sums, whatever the number of sampled examples is.
    """
    unit = np.float32(clip) / np.float32(UNITS)
    slopes = np.asarray(totals, np.float32) * unit / np.float32(batch) / (np.float32(eps) * np.float32(2))
    return (slopes * (np.float32(lr) / np.float32(len(totals)))).astype(np.float32)


def gradient_contributions(gradients: F32, clip: float, sigma: float) -> I64:
    """Returns each example's contribution to the sum of gradients, in whole units, int64 (n, D).

    Each row's L2 norm is at most NOISE_UNITS / sigma. gradients: float32 (n, D). NaN counts as zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(gradients, np.float32) / np.float32(clip)
    scaled = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -MAX_GRADIENT, MAX_GRADIENT)
    norms = np.sqrt(np.square(scaled, dtype=np.float64).sum(axis=1, keepdims=True))
    units: I64 = np.trunc(scaled * ((1 - MARGIN) * NOISE_UNITS / sigma / np.maximum(norms, 1))).astype(np.int64)
    return units


def gradient_noise(keys: I32, size: int) -> I64:
    """Returns the noise that a program draws from its keys, in whole units, int64 (D,). keys: int32 (NOISE_KEYS, 2)."""
    draws = [direction("gaussian", (int(key[0]), int(key[1])), size) for key in keys]
    noise: I64 = np.rint(sum(draws) * (NOISE_UNITS / np.sqrt(len(keys)))).astype(np.int64)
    return noise


def noise_keys(steps: int, entropy: Entropy = os.urandom) -> I32:
    """Returns the keys of each step's noise, int32 (steps, NOISE_KEYS, 2). Whoever has them can subtract the noise."""
    integers = np.frombuffer(entropy(8 * steps * NOISE_KEYS), "<i4")
    return integers.astype(np.int32).reshape(steps, NOISE_KEYS, 2)


def unit_noise(settings: ExamplePrivacy, steps: int, queries: int, entropy: Entropy = os.urandom) -> F32:
    """Returns the noise of each step's sums, in whole units, float32 (steps, q)."""
    noise = rounded_gaussian(settings.sigma * UNITS, steps * queries, entropy)
    return noise.astype(np.float32).reshape(steps, queries)


def noised_mean(
    mean: NDArray[np.float64], members: int, settings: MemberPrivacy, entropy: Entropy = os.urandom
) -> NDArray[np.float64]:
    """Returns the mean (D,) of `members` clipped updates of equal weight, with noise added.

    Replacing one update by zeros moves the mean by at most clip / members, so the noise's standard deviation is
    sigma clip / members.
    """
    scale = settings.noise_multiplier * settings.clip / members
    return mean + scale * gaussian(len(mean), entropy)
