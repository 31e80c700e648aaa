"""A job: one request to personalize for one user, its training settings and its state machine.

Knows no database and no HTTP.
"""

from __future__ import annotations

import math
from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.capabilities import Requirements
from shared.privacy import ExamplePrivacy
from shared.recipe import DEFAULT_EPS, MAX_SEED, Recipe, RecipeSettings
from shared.rules import Rules
from shared.task import Task
from shared.trajectory import Evaluation

MOST_PRIORITY = 10
NAME = r"^[a-z0-9][a-z0-9._-]{0,95}$"  # of adapters, users, data sets and devices: safe in URLs and paths
Schedule = Literal["constant", "linear", "cosine"]
History = Literal["none", "beside", "instead"]


class JobState(StrEnum):
    """Where a job stands."""

    QUEUED = "queued"  # waits for its program
    COMPILING = "compiling"
    READY = "ready"  # waits for a device
    TRAINING = "training"  # leased to a device
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing moves from here."""
        return not MOVES[self]


MOVES: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.COMPILING, JobState.READY, JobState.FAILED, JobState.CANCELLED}),
    JobState.COMPILING: frozenset({JobState.QUEUED, JobState.READY, JobState.FAILED, JobState.CANCELLED}),
    JobState.READY: frozenset({JobState.TRAINING, JobState.FAILED, JobState.CANCELLED}),
    JobState.TRAINING: frozenset(
        # QUEUED: its device has too little memory, and a smaller recipe takes the place of its own.
        {JobState.QUEUED, JobState.READY, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class TrainingSettings(BaseModel):
    """How a device trains: Algorithm 1's step budget, learning rate and perturbation scale, and what surrounds them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(150, ge=1, le=1_000_000, description="T: step budget")
    lr: float = Field(1e-2, gt=0, le=1e3, allow_inf_nan=False, description="eta: learning rate")
    schedule: Schedule = Field("constant", description="of lr over the steps; the paper names none: constant")
    warmup_steps: int = Field(0, ge=0, description="steps over which lr rises linearly from zero")
    eps: float | None = Field(
        None, gt=0, le=1e2, allow_inf_nan=False, description="perturbation scale; null: the precision's own"
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="job seed: directions and example order derive from it")
    evaluation_interval: int = Field(25, ge=1, description="steps between validations; the best one's B is kept")
    validation_limit: int | None = Field(200, ge=1, description="most validation examples; null: all")
    test_limit: int | None = Field(None, ge=1, description="most test examples; null: all")
    # Absent where 0, so that what was signed before it was known keeps its bytes.
    proximal: float = Field(
        0,
        ge=0,
        le=1e3,
        allow_inf_nan=False,
        exclude_if=lambda value: value == 0,
        description="mu: strength of the pull towards what the run goes on from (FedProx), so that it stays near; in a "
        "cohort, `algorithm.mu` says it",
    )

    @model_validator(mode="after")
    def _stays_short_of_the_start(self) -> TrainingSettings:
        if self.proximal * self.lr > 1:
            raise ValueError(f"proximal {self.proximal:g} pulls past the start at lr {self.lr:g}: lower either")
        return self

    def eps_for(self, recipe: RecipeSettings) -> float:
        """The perturbation scale: the given one, or the default of the recipe's precision."""
        return DEFAULT_EPS[recipe.precision] if self.eps is None else self.eps

    def lr_at(self, step: int) -> float:
        """Learning rate of step `step` (0-based). Linear and cosine fall to zero just after the last step."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / (self.warmup_steps + 1)
        span = max(self.steps - self.warmup_steps, 1)
        progress = (step - self.warmup_steps) / span
        if self.schedule == "linear":
            return self.lr * (1 - progress)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * progress)) / 2
        return self.lr


class JobStart(BaseModel):
    """The adapter version that a job goes on from, of the job's own tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    adapter: str = Field(pattern=NAME)
    revision: str = Field(
        "main",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$",
        description="main, a tag, v7 or 7, or hexadecimal digits of a revision; a job that was taken has all 40",
    )


class RoundRef(BaseModel):
    """The round of a cohort (`shared.cohort`) that a job belongs to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    cohort: str = Field(pattern=NAME)
    number: int = Field(ge=1, description="counts from 1 within the cohort")

    @property
    def words(self) -> str:
        """For people."""
        return f"round {self.number} of cohort {self.cohort}"


class JobRequest(BaseModel):
    """What `POST /v1/jobs` takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str = Field(min_length=1, max_length=200, description="name of a registered base model")
    user: str = Field(pattern=NAME, description="whom the adapter is for")
    adapter: str = Field(pattern=NAME, description="registry name of the adapter; each success adds a version")
    task: str | Task = Field(description="a shipped task's name, or a whole task")
    dataset: str = Field(pattern=NAME, description="the device's own name for the data to train on")
    recipe: RecipeSettings = Field(
        default_factory=RecipeSettings, description="left out where the job has a start: the start's own"
    )
    start: JobStart | None = Field(None, description="the adapter version to go on from; null: B = 0, the base alone")
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    privacy: ExamplePrivacy | None = Field(
        None,
        description="of each example of the data; its recipe is then `clipped`. The last B is sent, not the best, and "
        "no loss, accuracy or count of the data with it",
    )
    device: str | None = Field(None, description="id of the only device that may train it; null: any with the data set")
    rules: Rules = Field(default_factory=Rules, description="when it may be trained, beside the device's own rules")
    requires: Requirements = Field(default_factory=Requirements, description="what the device must have")
    history: History = Field(
        "none",
        description="asks for the trajectory beside B, or instead of it; a device sends it only if its owner's rules "
        "allow it, else B alone",
    )
    shrink: bool = Field(False, description="a smaller recipe may take its place where a device has too little memory")
    priority: int = Field(
        0,
        ge=-MOST_PRIORITY,
        le=MOST_PRIORITY,
        description="among the tenant's own jobs: the higher is compiled and trained first",
    )


class Result(BaseModel):
    """What a device reports with its adapter: numbers only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(ge=0, description="steps trained")
    best_step: int = Field(ge=0, description="steps after which the uploaded B was taken")
    train_seconds: float = Field(ge=0, allow_inf_nan=False)
    seconds: float = Field(ge=0, allow_inf_nan=False)
    peak_rss_bytes: int = Field(ge=0, description="of the agent's process that trains")
    train_examples: int | None = Field(None, ge=0, description="null: a private run's, which nobody is told")
    truncated_examples: int | None = Field(None, ge=0)
    evaluations: tuple[Evaluation, ...] = Field((), max_length=10_000)
    zero_shot_accuracy: float | None = Field(
        None, ge=0, le=1, description="of the base alone; null where the run went on from an adapter"
    )
    start_accuracy: float | None = Field(
        None, ge=0, le=1, description="of the adapter that the run went on from; null where it began from the base"
    )
    tuned_accuracy: float | None = Field(None, ge=0, le=1)

    @property
    def before_accuracy(self) -> float | None:
        """Accuracy before the run's first step, whatever it began from."""
        return self.zero_shot_accuracy if self.start_accuracy is None else self.start_accuracy


class Progress(BaseModel):
    """What a heartbeat tells of a run, or a worker of its compile: numbers and one word of phase."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    phase: Literal["compiling", "downloading", "loading", "evaluating", "training", "waiting", "uploading"]
    step: int = Field(0, ge=0)
    steps: int = Field(0, ge=0)
    loss: float | None = Field(None, description="mean over the step's paths, nats")
    lr: float | None = None
    examples_per_second: float | None = Field(None, ge=0, description="E examples a step, over the last steps")
    seconds_left: float | None = Field(None, ge=0)
    rss_bytes: int | None = Field(None, ge=0)
    accuracy: float | None = Field(None, ge=0, le=1, description="latest validation accuracy")
    best_accuracy: float | None = Field(None, ge=0, le=1)
    why: str | None = Field(None, max_length=500, description="in words: why it waits or goes slowly, or what it does")

    def private(self) -> Progress:
        """What of it may be told of a private run: nothing that depends on the data, and no pace or memory either."""
        return Progress(phase=self.phase, step=self.step, steps=self.steps, lr=self.lr, why=self.why)

    def line(self) -> str:
        """All of it for people, on one line."""
        words: list[str] = [self.phase]
        if self.steps:
            words.append(f"step {self.step}/{self.steps}")
        if self.loss is not None:
            words.append(f"loss {self.loss:.3f}")
        if self.examples_per_second is not None:
            words.append(f"{self.examples_per_second:.1f} samples/s")
        if self.seconds_left is not None:
            minutes, seconds = divmod(int(self.seconds_left), 60)
            words.append(f"{minutes}:{seconds:02d} left")
        if self.rss_bytes is not None:
            words.append(f"{self.rss_bytes / 1e6:.0f} MB")
        if self.accuracy is not None:
            words.append(f"validation {self.accuracy:.1%}")
        if self.best_accuracy is not None:
            words.append(f"best {self.best_accuracy:.1%}")
        if self.why is not None:
            words.append(self.why)
        return "  ".join(words)


class JobError(BaseModel):
    """Why a job failed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    code: str = Field(max_length=100)
    detail: str = Field(max_length=4000)


class JobView(BaseModel):
    """A job as the API shows it."""

    model_config = ConfigDict(extra="forbid")

    id: str
    state: JobState
    request: JobRequest
    task: Task
    recipe: Recipe
    recipe_id: str
    round: RoundRef | None = Field(
        None,
        exclude_if=lambda value: value is None,  # agents of earlier releases refuse a field that they do not know
        description="the cohort's round that it is a member's part of; only the server makes such jobs",
    )
    attempts: int
    device_id: str | None
    progress: Progress | None
    result: Result | None
    adapter_version: int | None
    error: JobError | None
    created_at: datetime
    updated_at: datetime
