"""Jobs: a request to personalize a model for one user, its states and progress."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, Discriminator, Field, Tag, field_validator, model_validator

from shared.capabilities import Requirements
from shared.errors import MobizoError
from shared.privacy import ExamplePrivacy
from shared.recipe import Recipe, RequestedRecipe
from shared.result import Phase, Result
from shared.rules import Rules
from shared.strict_model import StrictModel
from shared.task import Task, TaskName
from shared.training_settings import TrainingSettings

MAX_PRIORITY = 10
# Codes of errors by which a device's owner refuses a job. They are no failures of the device.
TASK_NOT_APPROVED, PRIVACY_LIMIT_REACHED = "task-not-approved", "privacy-limit-reached"
OWNER_REFUSALS = frozenset({TASK_NOT_APPROVED, PRIVACY_LIMIT_REACHED})
TOO_FEW_NEW_RECORDS = "too-few-new-records"  # of a job that repeats; no failure of the device either
NAME = r"^[a-z0-9][a-z0-9._-]{0,95}$"  # of adapters, users, data sets and devices: safe in URLs and paths
TrajectoryUpload = Literal["none", "beside", "instead"]  # of B: whether the trajectory is sent beside it or instead


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "queued"  # waits for its program
    COMPILING = "compiling"
    READY = "ready"  # waits for a device
    TRAINING = "training"  # leased to a device
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether the state is final, i.e. has no transitions."""
        return not TRANSITIONS[self]


TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.COMPILING, JobState.READY, JobState.FAILED, JobState.CANCELLED}),
    JobState.COMPILING: frozenset({JobState.QUEUED, JobState.READY, JobState.FAILED, JobState.CANCELLED}),
    JobState.READY: frozenset({JobState.TRAINING, JobState.FAILED, JobState.CANCELLED}),
    JobState.TRAINING: frozenset(
        # QUEUED: the device has too little memory, and the job is compiled again with a smaller recipe.
        {JobState.QUEUED, JobState.READY, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


class JobStart(StrictModel):
    """The adapter version, of the same tenant, that a job continues from; as text, ADAPTER@REVISION."""

    adapter: str = Field(pattern=NAME)
    revision: str = Field(
        "main",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,95}$",
        description="main, v7 or 7, or a revision's leading digits; resolved to all 40 on submission",
    )

    @model_validator(mode="before")
    @classmethod
    def _of_text(cls, value: Any) -> Any:
        """Splits the text `ADAPTER` or `ADAPTER@REVISION`."""
        if not isinstance(value, str):
            return value
        adapter, at, revision = value.partition("@")
        return {"adapter": adapter, "revision": revision} if at else {"adapter": adapter}


# The device chooses, among the versions of its lease that fit the job and B = 0, and reports the name.
AUTO: Literal["auto"] = "auto"
# A function tells both apart, so that an invalid version is reported once.
AutoStart = Annotated[
    Annotated[Literal["auto"], Tag("auto")] | Annotated[JobStart, Tag("version")],
    Discriminator(lambda start: "auto" if start == AUTO else "version"),
]


class RoundRef(StrictModel):
    """The round of a cohort (`shared.federation.cohort`) that a job belongs to."""

    cohort: str = Field(pattern=NAME)
    number: int = Field(ge=1, description="counts from 1 within the cohort")

    @property
    def label(self) -> str:
        """The round and its cohort, for people."""
        return f"round {self.number} of cohort {self.cohort}"


class Repeat(StrictModel):
    """A series of jobs: each starts from `main` of the adapter as it is then, once new records have come."""

    every: str = Field(
        pattern=r"^[1-9][0-9]{0,2}[hd]$", description="time from the end of a job to the next one, such as 12h or 7d"
    )
    min_new_records: int = Field(
        50, ge=0, le=1_000_000_000, description="the device does not train a job with fewer records since its start"
    )
    until: AwareDatetime | None = Field(None, description="no job is created after this time; null: until cancelled")

    def after(self, moment: datetime) -> datetime:
        """Returns when the next job is due after one that ended at `moment`."""
        return moment + timedelta(hours=int(self.every[:-1]) * (24 if self.every.endswith("d") else 1))


class JobRequest(StrictModel):
    """The body of `POST /v1/jobs`."""

    base: str = Field(min_length=1, max_length=200, description="name of a registered base model")
    user: str = Field(pattern=NAME, description="user that the adapter is trained for")
    adapter: str = Field(pattern=NAME, description="registry name of the adapter; each success adds a version")
    task: TaskName | Task = Field(description="name of a built-in task, or a complete task")
    dataset: str = Field(pattern=NAME, description="the device's own name for the data to train on")
    recipe: RequestedRecipe = Field(
        default_factory=RequestedRecipe, description="leave out if the job has a start, whose recipe is then used"
    )
    start: AutoStart | None = Field(
        None,
        description="adapter version to continue from, an object or ADAPTER@REVISION; `auto`: the device chooses "
        "among versions of the user and of its cohorts, and B = 0, by its held-out records; null: B = 0",
    )
    training: TrainingSettings = Field(default_factory=TrainingSettings)
    privacy: ExamplePrivacy | None = Field(
        None,
        description="example-level privacy; requires a recipe with privacy `clipped`. The last B is "
        "uploaded, not the best, and "
        "no loss, accuracy or number of examples",
    )
    device: str | None = Field(
        None,
        max_length=64,
        description="id of the only device that may train the job; null: any device with the data set",
    )
    repeat: Repeat | None = Field(
        None,
        exclude_if=lambda value: value is None,  # agents of earlier releases refuse a field that they do not know
        description="creates another job after each one has ended; null: the job does not repeat",
    )
    rules: Rules = Field(
        default_factory=Rules, description="when the job may be trained, in addition to the device's own rules"
    )
    requires: Requirements = Field(default_factory=Requirements, description="capabilities that the device must have")
    trajectory: TrajectoryUpload = Field(
        "none",
        description="requests the trajectory beside B, or instead of it; a device sends it only if its owner's rules "
        "allow it, and otherwise sends B only",
    )
    priority: int = Field(
        0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="among the tenant's own jobs; higher values are trained first",
    )

    @model_validator(mode="before")
    @classmethod
    def _without_shrink(cls, values: Any) -> Any:
        """Drops `shrink`, which requests of earlier releases have. Estimator `auto` adapts a job to little memory."""
        return {name: values[name] for name in values if name != "shrink"} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check_private(self) -> JobRequest:
        if self.privacy is not None and self.training.patience is not None:
            raise ValueError("a private job measures nothing on its data, so it cannot end early; leave out `patience`")
        if self.privacy is not None and self.start == AUTO:
            raise ValueError("a private job measures nothing on its data, so it cannot choose a start; name a version")
        return self

    @field_validator("recipe", mode="before")
    @classmethod
    def _keep_estimator(cls, recipe: Any) -> Any:
        """Keeps the estimator of complete settings: left out of a body as a default, it would become `auto`."""
        complete = isinstance(recipe, RequestedRecipe) and type(recipe) is not RequestedRecipe
        return recipe.requested() if complete else recipe


class Progress(StrictModel):
    """Progress of a run (in a heartbeat) or of a compilation."""

    phase: Phase
    step: int = Field(0, ge=0)
    steps: int = Field(0, ge=0)
    loss: float | None = Field(
        None, description="mean training loss (shared.zo.encoding) over the step's 2q paths, nats"
    )
    lr: float | None = None
    examples_per_second: float | None = Field(
        None, ge=0, description="training speed over the last steps, E examples per step"
    )
    seconds_left: float | None = Field(None, ge=0)
    rss_bytes: int | None = Field(None, ge=0)
    accuracy: float | None = Field(None, ge=0, le=1, description="latest validation accuracy")
    best_accuracy: float | None = Field(None, ge=0, le=1)
    validation_loss: float | None = Field(
        None, description="latest validation's mean of -log P(right answer | prompt) over examples, nats"
    )
    why: str | None = Field(None, max_length=500, description="why it waits or is slow, or what it is doing")

    def private(self) -> Progress:
        """Returns a copy for a private run: without anything that depends on the data, and without speed and memory."""
        return Progress(phase=self.phase, step=self.step, steps=self.steps, lr=self.lr, why=self.why)

    def without_accuracies(self) -> Progress:
        """Returns a copy for a task that writes text: without accuracies, since it has no answers to choose from."""
        return self.model_copy(update={"accuracy": None, "best_accuracy": None})

    def line(self) -> str:
        """Returns all fields as one line of text."""
        parts: list[str] = [self.phase]
        if self.steps:
            parts.append(f"step {self.step}/{self.steps}")
        if self.loss is not None:
            parts.append(f"loss {self.loss:.3f}")
        if self.examples_per_second is not None:
            parts.append(f"{self.examples_per_second:.1f} samples/s")
        if self.seconds_left is not None:
            minutes, seconds = divmod(int(self.seconds_left), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        if self.rss_bytes is not None:
            parts.append(f"{self.rss_bytes / 1e6:.0f} MB")
        if self.accuracy is not None:
            parts.append(f"validation {self.accuracy:.1%}")
        if self.best_accuracy is not None:
            parts.append(f"best {self.best_accuracy:.1%}")
        elif self.validation_loss is not None:
            parts.append(f"validation loss {self.validation_loss:.3f} a text")
        if self.why is not None:
            parts.append(self.why)
        return "  ".join(parts)


MAX_DETAIL = 4000  # characters of the reason why a job failed


class JobError(StrictModel):
    """Why a job failed: an error code and a message."""

    code: str = Field(max_length=100)
    detail: str = Field(max_length=MAX_DETAIL)

    @classmethod
    def of(cls, error: MobizoError) -> JobError:
        """Returns the reason of an error; a longer detail is cut."""
        return cls(code=error.code, detail=error.detail[:MAX_DETAIL])


class JobSummary(StrictModel):
    """A job in a list: without the bodies of its task and recipe, and without its result."""

    id: str
    state: JobState
    base: str
    user: str
    adapter: str
    dataset: str
    task: str = Field(description="name of the task")
    recipe_id: str
    priority: int
    round: RoundRef | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="federated round that the job belongs to",
    )
    attempts: int
    device_id: str | None
    progress: Progress | None
    adapter_version: int | None
    error: JobError | None
    created_at: datetime
    updated_at: datetime


class JobView(StrictModel):
    """A job as the API shows it."""

    id: str
    state: JobState
    request: JobRequest
    task: Task
    recipe: Recipe
    recipe_id: str
    estimator_reason: str | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="why the server chose the recipe's estimator, where the request has estimator auto",
    )
    round: RoundRef | None = Field(
        None,
        exclude_if=lambda value: value is None,  # agents of earlier releases refuse a field that they do not know
        description="federated round that the job belongs to; set only by the server",
    )
    series: str | None = Field(
        None,
        exclude_if=lambda value: value is None,
        description="of a job that repeats: id of the first job of its series",
    )
    next_at: datetime | None = Field(
        None, exclude_if=lambda value: value is None, description="when the next job of the series is created"
    )
    series_end: str | None = Field(
        None, exclude_if=lambda value: value is None, description="why the series ended with this job"
    )
    attempts: int
    device_id: str | None
    progress: Progress | None
    result: Result | None
    adapter_version: int | None
    error: JobError | None
    state_seconds: dict[JobState, float] = Field(
        {}, description="seconds in each state that the job has left; `result.phase_seconds` divides those of training"
    )
    created_at: datetime
    updated_at: datetime
