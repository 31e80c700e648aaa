"""Differential privacy: what a job or a cohort asks for, and the mechanism, as NumPy reference.

On a device, in each step: every example's q loss differences are clipped to an L2 norm of C together and cut to whole
units of C / UNITS; the program sums them over the step's sample and adds secret noise to each sum, which is a whole
number of units too. Nothing else of the data reaches B. Neighbours are two data sets of which one has one example more.
On a server, in each round: every member's update is clipped to an L2 norm, and noise is added to their mean.
Neighbours are two histories of the same members, one of whom sent zeros in every round.

DP-SGD is of Abadi et al., CCS'16; that it is enough to add noise to scalars where steps are zeroth-order, of Tang et
al., "Private Fine-tuning of Large Language Models with Zeroth-order Optimization", 2024. Knows no accountant.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.entropy import Entropy, gaussian, rounded_gaussian

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]

UNITS = 1 << 12  # that C is cut into; float32 holds the sums of MOST_SAMPLE examples and any noise whole
DELTA = 1e-5  # that epsilon is told at unless somebody says another
MOST = 1024.0  # times C; differences beyond it count as it, so that no square overflows
MOST_NOISE = 64.0  # times C; float32 still holds every whole number of units there is
MOST_SAMPLE = 1 << 11  # examples of one step


class ExamplePrivacy(BaseModel):
    """Of each example of a device's data, against whoever sees the run's B, or its trajectory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip: float = Field(
        0.05, gt=0, le=1e3, allow_inf_nan=False, description="C: the L2 norm of an example's q loss differences, nats"
    )
    noise_multiplier: float | None = Field(
        None,
        ge=0.3,
        le=MOST_NOISE,
        allow_inf_nan=False,
        description="sigma: the noise's standard deviation over C; null: the least that keeps to epsilon",
    )
    epsilon: float | None = Field(
        None, gt=0, le=100, allow_inf_nan=False, description="that the run may cost; null: whatever sigma makes it"
    )
    delta: float = Field(DELTA, gt=0, lt=1)
    sampling_rate: float = Field(
        gt=0,
        le=1,
        description="with which each example is in a step, by itself. Best about E over the number of examples, which "
        "nobody is told; a sample over E takes another call of the program",
    )

    @model_validator(mode="after")
    def _one_is_given(self) -> ExamplePrivacy:
        if self.noise_multiplier is None and self.epsilon is None:
            raise ValueError("give noise_multiplier, or the epsilon to find it for")
        return self

    @property
    def sigma(self) -> float:
        """The noise multiplier. Raises ValueError where it is still to be found."""
        if self.noise_multiplier is None:
            raise ValueError("the noise multiplier for this epsilon is not found yet")
        return self.noise_multiplier


class MemberPrivacy(BaseModel):
    """Of each member's update in a cohort's round, against whoever sees the cohort's versions; the server sees all."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clip: float = Field(gt=0, le=1e6, allow_inf_nan=False, description="the L2 norm of a member's update")
    noise_multiplier: float = Field(
        ge=0.3, le=1e3, allow_inf_nan=False, description="the noise's deviation over clip, in the sum of updates"
    )
    delta: float = Field(DELTA, gt=0, lt=1)
    epsilon: float | None = Field(
        None, gt=0, le=1e3, allow_inf_nan=False, description="budget of all rounds together; null: none"
    )


class PrivacySettings(BaseModel):
    """What a cohort promises. examples: on each device in each round; members: of their mean."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    examples: ExamplePrivacy | None = None
    members: MemberPrivacy | None = None

    @model_validator(mode="after")
    def _something(self) -> PrivacySettings:
        if self.examples is None and self.members is None:
            raise ValueError("privacy of neither examples nor members: leave it out")
        return self


class PrivacyBudget(BaseModel):
    """What an operator allows to be spent on a user's data, by all jobs together."""

    model_config = ConfigDict(extra="forbid")

    epsilon: float | None = Field(gt=0, le=1e3, allow_inf_nan=False, description="null: no limit")
    delta: float = Field(DELTA, gt=0, lt=1)


class UserPrivacy(BaseModel):
    """What was spent on a user's data."""

    model_config = ConfigDict(extra="forbid")

    user: str
    epsilon: float | None = Field(description="of all private runs, reserved ones too; null: beyond any number")
    delta: float
    budget: float | None = Field(description="epsilon that may be spent; null: no limit")
    runs: int = Field(description="private runs, one for each device that got a job")
    unprotected: int = Field(description="jobs without privacy: what these told of the data has no bound")


class CohortPrivacy(BaseModel):
    """What a cohort's rounds have spent."""

    model_config = ConfigDict(extra="forbid")

    cohort: str
    rounds: int = Field(description="that were published")
    members_epsilon: float | None = Field(description="on a member who was in every round; null: no noise on the mean")
    members_delta: float | None
    members_budget: float | None = Field(description="at which no further round opens; null: no limit")
    examples_epsilon: float | None = Field(
        description="on the examples of whoever it spent most on, by its rounds alone; null: not private"
    )
    examples_delta: float | None


def contributions(differences: F32, clip: float) -> I64:
    """What each example adds to the sums, whole units (n, q); ||row|| <= UNITS, whatever the differences are.

    differences: float32 (n, q), loss at B + eps z less loss at B - eps z. What is no number counts as zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = np.asarray(differences, np.float32) / np.float32(clip)
    scaled = np.clip(np.where(np.isnan(scaled), np.float32(0), scaled), -MOST, MOST).astype(np.float32)
    norms = np.sqrt(np.square(scaled).sum(axis=1, keepdims=True, dtype=np.float32))
    # One unit less than the bound pays for the rounding of norms and products in float32.
    factors = np.float32(UNITS - 1) / np.maximum(norms, np.float32(1))
    units: I64 = np.trunc(scaled * factors).astype(np.int64)
    return units


def coefficients_of(totals: F32, clip: float, lr: float, eps: float, batch: int) -> F32:
    """Coefficients (q,) of noised totals, whole units (q,). batch: E, which divides sums of however many examples."""
    unit = np.float32(clip) / np.float32(UNITS)
    slopes = np.asarray(totals, np.float32) * unit / np.float32(batch) / (np.float32(eps) * np.float32(2))
    return (slopes * (np.float32(lr) / np.float32(len(totals)))).astype(np.float32)


def unit_noise(settings: ExamplePrivacy, steps: int, queries: int, entropy: Entropy = os.urandom) -> F32:
    """The noise of each step's sums, whole units, float32 (steps, q)."""
    noise = rounded_gaussian(settings.sigma * UNITS, steps * queries, entropy)
    return noise.astype(np.float32).reshape(steps, queries)


def noised_mean(
    mean: NDArray[np.float64], members: int, settings: MemberPrivacy, entropy: Entropy = os.urandom
) -> NDArray[np.float64]:
    """The mean (D,) of `members` clipped updates, each of equal weight, with noise.

    One update of zeros instead moves the mean by at most clip / members, so that sigma clip / members is its noise.
    """
    scale = settings.noise_multiplier * settings.clip / members
    return mean + scale * gaussian(len(mean), entropy)
