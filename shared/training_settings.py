"""The training settings of a job: steps, learning rate and its schedule, perturbation scale, evaluations."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from shared.recipe import DEFAULT_EPS, MAX_SEED, RequestedRecipe
from shared.strict_model import StrictModel

Schedule = Literal["constant", "linear", "cosine"]
DEFAULT_REHEARSAL = 0.3


class TrainingSettings(StrictModel):
    """Settings of a training run: step budget, learning rate, perturbation scale (Algorithm 1) and evaluations."""

    steps: int = Field(150, ge=1, le=1_000_000, description="T: step budget")
    lr: FiniteFloat = Field(1e-2, gt=0, le=1e3, description="eta: learning rate")
    schedule: Schedule = Field(
        "constant", description="learning-rate schedule; the paper names none, so the default is constant"
    )
    warmup_steps: int = Field(0, ge=0, description="steps over which lr rises linearly from zero")
    eps: FiniteFloat | None = Field(
        None, gt=0, le=1e2, description="perturbation scale; null: the default of the precision"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="job seed; directions and example order are derived from it")
    evaluation_interval: int = Field(
        25, ge=1, description="steps between validations; the B of the best validation is kept"
    )
    # Omitted when null, so that documents signed before this field existed keep their bytes.
    patience: int | None = Field(
        None,
        ge=1,
        exclude_if=lambda value: value is None,
        description="training ends after this many validations in a row without a better one; null: it takes all "
        "steps. Not in private jobs and cohorts, which upload the last B",
    )
    validation_limit: int | None = Field(200, ge=1, description="maximum validation examples; null: all")
    test_limit: int | None = Field(None, ge=1, description="maximum test examples; null: all")
    # Omitted when 0, so that documents signed before this field existed keep their bytes.
    proximal: FiniteFloat = Field(
        0,
        ge=0,
        le=1e3,
        exclude_if=lambda value: value == 0,
        description="mu: strength of FedProx's proximal term, which pulls B towards its starting point; in a "
        "cohort, use `algorithm.mu` instead",
    )

    # Excluded at their defaults, so that the signatures of older jobs stay valid.
    max_norm: FiniteFloat | None = Field(
        None,
        gt=0,
        le=1e6,
        exclude_if=lambda value: value is None,
        description="upper bound of the mean gradient's L2 norm, with estimator gradient; null: no clipping",
    )
    weight_decay: FiniteFloat = Field(
        0,
        ge=0,
        le=1e3,
        exclude_if=lambda value: value == 0,
        description="weight decay of B, decoupled from the gradient (AdamW), with estimator gradient",
    )

    beta: FiniteFloat = Field(
        0.1,
        gt=0,
        le=1e3,
        exclude_if=lambda value: value == 0.1,
        description="scale of the log-ratios with losses dpo and kto; a smaller one lets the adapter move further away "
        "from the model before training",
    )
    desirable_weight: FiniteFloat = Field(
        1,
        gt=0,
        le=1e3,
        exclude_if=lambda value: value == 1,
        description="weight of answers that people liked, with loss kto",
    )
    undesirable_weight: FiniteFloat = Field(
        1,
        gt=0,
        le=1e3,
        exclude_if=lambda value: value == 1,
        description="weight of answers that people did not like, with loss kto",
    )
    kl_weight: FiniteFloat = Field(
        0,
        ge=0,
        le=1e3,
        exclude_if=lambda value: value == 0,
        description="weight of the divergence KL(start || adapter) in the loss, at the answer tokens and over what the "
        "loss is over, the vocabulary or the candidates; start: the model before training. With estimators gradient "
        "and directional, losses full and candidates. A step then runs the adapted layers forward twice. 0: none",
    )
    token_dropout: FiniteFloat = Field(
        0,
        ge=0,
        lt=1,
        exclude_if=lambda value: value == 0,
        description="share of a prompt's tokens that are left out of training, drawn anew at each visit of an example; "
        "the first token and the last 8 stay. A model that is trained on few records then learns from more of their "
        "words, and a step takes less time. Evaluations read whole prompts. 0: none",
    )
    rehearsal: FiniteFloat = Field(
        DEFAULT_REHEARSAL,
        ge=0,
        lt=1,
        exclude_if=lambda value: value == DEFAULT_REHEARSAL,
        description="of a job with a start: the share of the examples that the device draws from records that it "
        "trained with the same task to make the start; the others are new. 0: all records are drawn alike. Private "
        "jobs and cohorts rehearse nothing",
    )

    @model_validator(mode="after")
    def _check_proximal(self) -> TrainingSettings:
        if self.proximal * self.lr > 1:
            raise ValueError(f"proximal {self.proximal:g} overshoots the start at lr {self.lr:g}; lower one of them")
        return self

    def eps_for(self, recipe: RequestedRecipe) -> float:
        """Returns the perturbation scale: `eps` if set, otherwise the default of the recipe's precision."""
        return DEFAULT_EPS[recipe.precision] if self.eps is None else self.eps

    def lr_at(self, step: int) -> float:
        """Returns the learning rate of step `step`, counted from 0.

        The linear and cosine schedules reach zero after the last step.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        span = max(self.steps - self.warmup_steps, 1)
        progress = (step - self.warmup_steps) / span
        if self.schedule == "linear":
            return self.lr * (1 - progress)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * progress)) / 2
        return self.lr
