"""A cohort: users whose devices train one shared adapter together, and the rounds in which they do it.

The wire models of federation: what a cohort is set to, what a device is told of a round, what people are shown.
Knows no HTTP, no database, and not how updates become a version (`shared.federation`).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.job import NAME, RoundRef, TrainingSettings
from shared.masking.settings import MaskingParameters, MaskingSettings
from shared.privacy import PrivacySettings
from shared.recipe import Recipe, RecipeSettings, Sha256
from shared.task import Task

AlgorithmName = Literal["fedavg", "fedprox", "fedbuff"]
AggregatorName = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"]
OptimizerName = Literal["sgd", "momentum", "adam"]
Weights = Literal["equal", "examples"]
UploadForm = Literal["weights", "trajectory", "masked"]
Membership = Literal["open", "operator"]

MOST_DEADLINE = 90 * 24 * 3600.0  # seconds that a round may be open


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AlgorithmSettings(_Fact):
    """How devices' work becomes versions: the device half and the server half are found by `name`."""

    name: AlgorithmName = Field("fedavg", description="fedbuff: asynchronous, updates of several versions in one round")
    mu: float = Field(
        0, ge=0, le=1e3, allow_inf_nan=False, description="FedProx: strength of the pull towards the round's start"
    )
    staleness_exponent: float = Field(
        0.5, ge=0, le=10, allow_inf_nan=False, description="FedBuff: an update s versions old weighs (1 + s)^-this"
    )
    buffer_size: int = Field(10, ge=1, le=1_000_000, description="FedBuff: K, updates that make a version")

    @property
    def asynchronous(self) -> bool:
        """Whether updates that began from earlier versions count."""
        return self.name == "fedbuff"


class AggregatorSettings(_Fact):
    """How many updates become one."""

    name: AggregatorName = "mean"
    clip_norm: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="updates of a larger Euclidean norm are scaled down to it"
    )
    trim_share: float = Field(
        0.1, ge=0, lt=0.5, description="trimmed_mean: share of values left out at either end of each coordinate"
    )
    krum_f: int = Field(0, ge=0, description="krum, multi_krum: updates that may be malicious")


class OptimizerSettings(_Fact):
    """How the aggregated update, taken as a gradient, moves the shared adapter (Reddi et al., 2021)."""

    name: OptimizerName = "sgd"
    lr: float = Field(1.0, gt=0, le=1e3, allow_inf_nan=False, description="sgd with 1: the plain mean")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum, adam")
    beta2: float = Field(0.99, ge=0, lt=1, description="adam")
    eps: float = Field(1e-3, gt=0, allow_inf_nan=False, description="adam: tau of the paper, its adaptivity")


class CohortSettings(_Fact):
    """What `POST /v1/cohorts` takes; it stays as it is for the cohort's life."""

    name: str = Field(pattern=NAME, description="of the cohort and of its shared adapter in the registry")
    base: str = Field(min_length=1, max_length=200, description="name of a registered base model")
    recipe: RecipeSettings = Field(default_factory=RecipeSettings)
    task: str | Task = Field(description="a shipped task's name, or a whole task")
    dataset: str = Field(pattern=NAME, description="the devices' own name for the data to train on")
    training: TrainingSettings = Field(
        default_factory=TrainingSettings, description="of one device's local work in a round"
    )
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    aggregator: AggregatorSettings = Field(default_factory=AggregatorSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    weights: Weights = Field("equal", description="examples: as many examples as a device says that it trained on")
    most_examples: int = Field(
        1000, ge=1, le=2**31 - 1, description="a device that claims more counts as one that has this many"
    )
    norm_limit: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="an update of a larger Euclidean norm is refused; null: no limit"
    )
    quorum: int = Field(2, ge=1, le=1_000_000, description="fewest updates of which a round may make a version")
    deadline_seconds: float = Field(
        24 * 3600.0, gt=0, le=MOST_DEADLINE, allow_inf_nan=False, description="how long a round is open"
    )
    upload: UploadForm = Field("weights", description="what a device sends: B, its trajectory, or masked numbers")
    masking: MaskingSettings | None = Field(None, description="of upload masked, which needs it; null for all others")
    privacy: PrivacySettings | None = Field(
        None, description="of the devices' examples, of the members, or both; null: of nobody"
    )
    membership: Membership = Field("open", description="operator: only a token that may write cohorts adds members")
    automatic: bool = Field(False, description="the next round opens by itself once the last one has ended")
    most_rounds: int | None = Field(None, ge=1, le=1_000_000, description="no more are opened; null: any number")

    @property
    def most_weight(self) -> int:
        """The most that one update may count for."""
        return self.most_examples if self.weights == "examples" else 1

    @model_validator(mode="after")
    def _consistent(self) -> CohortSettings:
        name, aggregator = self.algorithm.name, self.aggregator
        if name == "fedprox" and self.algorithm.mu == 0:
            raise ValueError("algorithm fedprox pulls by mu; give it mu > 0, or take fedavg")
        if self.training.proximal:
            raise ValueError("in a cohort, algorithm.mu says how strong the pull towards the start is, not training")
        if self.algorithm.mu * self.training.lr > 1:
            raise ValueError(f"mu {self.algorithm.mu:g} pulls past the start at lr {self.training.lr:g}: lower either")
        if self.algorithm.asynchronous and self.quorum > self.algorithm.buffer_size:
            raise ValueError("a round of fedbuff ends with buffer_size updates; quorum cannot be more")
        if aggregator.name in ("krum", "multi_krum") and self.quorum < 2 * aggregator.krum_f + 3:
            raise ValueError(f"{aggregator.name} withstands krum_f of at least 2 krum_f + 3 updates; raise quorum")
        if aggregator.name != "mean" and self.weights != "equal":
            raise ValueError(f"aggregator {aggregator.name} takes every update as one; it needs weights equal")
        if (self.masking is not None) != (self.upload == "masked"):
            raise ValueError("upload masked and masking belong together: give both, or neither")
        if self.masking is not None:
            if aggregator.clip_norm is None:
                raise ValueError("upload masked needs aggregator.clip_norm, which bounds what a hidden update can do")
            if self.quorum < self.masking.minimum:
                raise ValueError(f"masking sums no fewer than {self.masking.minimum} updates; raise quorum to that")
            if self.most_weight >= 2**24:
                raise ValueError("upload masked takes most_examples under 2^24")
            if aggregator.name != "mean" or self.norm_limit is not None:
                raise ValueError("upload masked hides each update: aggregator must be mean, without norm_limit")
            if self.algorithm.asynchronous:
                raise ValueError("upload masked needs one start for all; algorithm fedbuff has none")
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        if self.upload == "trajectory" and self.recipe.estimator != "replay":
            raise ValueError("upload trajectory is replayed by the server; the recipe needs estimator replay")
        return self

    def _check_privacy(self, privacy: PrivacySettings) -> None:
        if self.weights != "equal":
            raise ValueError("privacy needs weights equal: how many examples a device has is nobody's business")
        if (privacy.examples is not None) != (self.recipe.privacy == "clipped"):
            raise ValueError("privacy of examples is of a recipe with privacy clipped: give both, or neither")
        if privacy.members is None:
            return
        if self.aggregator.name != "mean" or self.upload == "masked":
            raise ValueError("privacy of members is noise on a mean of updates that the server clips: aggregator mean")
        if self.aggregator.clip_norm is not None:
            raise ValueError("privacy of members clips by its own clip; leave aggregator.clip_norm out")


class RoundState(StrEnum):
    """Where a round stands."""

    OPEN = "open"  # takes updates
    AGGREGATING = "aggregating"  # a worker makes the version of them
    PUBLISHED = "published"
    ABANDONED = "abandoned"  # below quorum at the deadline, closed by a person, or its version could not be made

    @property
    def final(self) -> bool:
        """Whether nothing moves from here."""
        return self in (RoundState.PUBLISHED, RoundState.ABANDONED)


class RoundTask(RoundRef):
    """What a device is told of the round that its job belongs to."""

    algorithm: AlgorithmSettings
    upload: UploadForm = "weights"
    masking: MaskingParameters | None = Field(None, description="of upload masked: what all its devices agree on")
    privacy: PrivacySettings | None = Field(None, description="what the cohort promises to its members")
    deadline: datetime = Field(description="after it the update may come too late")


class CohortOrigin(_Fact):
    """How a cohort's version came to be."""

    cohort: str = Field(pattern=NAME)
    round: int = Field(ge=1)
    updates: int = Field(ge=1, description="how many counted")
    algorithm: AlgorithmSettings
    aggregator: AggregatorSettings
    optimizer: OptimizerSettings
    epsilon: float | None = Field(None, ge=0, description="spent by then on whom it spent the most; null: not private")


class MemberRequest(_Wire):
    """A user joins, with the device that trains for him."""

    device: str = Field(min_length=1, max_length=64, description="id of an enrolled device of the tenant")


class MemberView(_Wire):
    """A user of a cohort."""

    user: str
    device_id: str
    joined_at: datetime
    updates: int = Field(description="of his that counted, over all rounds")


class RoundView(_Wire):
    """A round as the API shows it."""

    cohort: str
    number: int
    state: RoundState
    why: str = Field("", description="why it was abandoned, or what it waits for")
    members: int = Field(description="who were asked for an update")
    updates: int = Field(description="that count")
    start_version: int | None = Field(description="of the cohort's adapter; null: B = 0")
    version: int | None = Field(None, description="of the cohort's adapter that it made; null: none")
    start_accuracy: float | None = Field(
        None, description="of what the round started from: mean over the devices that measured it on their own data"
    )
    tuned_accuracy: float | None = Field(None, description="of the devices' own results, before they were averaged")
    measured: int = Field(0, description="devices that said so")
    upload_bytes: int = Field(0, description="that the counted devices sent")
    opened_at: datetime
    deadline: datetime
    ended_at: datetime | None = None


class UpdateState(StrEnum):
    """What became of a member's part in a round."""

    WAITING = "waiting"  # his device has not finished
    COUNTED = "counted"
    LEFT = "left"  # he left the cohort
    FAILED = "failed"  # his device reported an error
    MISSED = "missed"  # the round ended before


class UpdateView(_Wire):
    """A member's part in a round, as the API shows it; never the update itself."""

    user: str
    device_id: str
    job_id: str | None = Field(description="null: not made yet")
    state: UpdateState
    claimed_examples: int | None = Field(None, description="that the device said it trained on")
    examples: int | None = Field(None, description="that count: at most the cohort's most_examples")
    norm: float | None = Field(None, description="Euclidean norm of the update")
    staleness: int | None = Field(None, description="versions that the cohort's adapter was ahead of its start")
    bytes: int | None = Field(None, description="sent")
    start_accuracy: float | None = None
    tuned_accuracy: float | None = None
    updated_at: datetime


class CohortView(_Wire):
    """A cohort as the API shows it."""

    name: str
    settings: CohortSettings
    task: Task
    recipe: Recipe
    recipe_id: Sha256
    a_sha256: Sha256 = Field(description="over the frozen A matrices, which all members share")
    size_d: int = Field(description="D: elements of flat B")
    members: int
    rounds: int = Field(description="how many were opened")
    round: RoundView | None = Field(description="the latest; null: none was opened")
    version: int | None = Field(description="that the next round starts from; null: none yet")
    created_at: datetime


class RoundReceipt(_Wire):
    """What `complete` answers to a device whose job was part of a round: its update counts."""

    cohort: str
    round: int
    updates: int = Field(description="that count by now")
