"""JSON models of federation: cohorts, rounds, members and updates.

A cohort is a set of users whose devices train one shared adapter together, in rounds.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Literal

from pydantic import Field, FiniteFloat, model_validator

from shared.federation.secure_aggregation.settings import SecureAggregationParameters, SecureAggregationSettings
from shared.job import NAME, RoundRef
from shared.privacy import PrivacySettings
from shared.recipe import LEDGER_ESTIMATORS, Recipe, RequestedEstimator, RequestedRecipe, Sha256
from shared.strict_model import StrictModel
from shared.task import Task, TaskName
from shared.training_settings import TrainingSettings

AlgorithmName = Literal["fedavg", "fedprox", "fedbuff"]
AggregatorName = Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"]
OptimizerName = Literal["sgd", "momentum", "adam"]
Weights = Literal["equal", "examples"]
UploadForm = Literal["weights", "trajectory", "masked"]
Membership = Literal["open", "operator"]

MAX_DEADLINE = 90 * 24 * 3600.0  # longest duration of a round, seconds


class AlgorithmSettings(StrictModel):
    """The federated algorithm. `name` selects its device half and its server half."""

    name: AlgorithmName = Field("fedavg", description="fedbuff: asynchronous, updates of several versions in one round")
    mu: FiniteFloat = Field(0, ge=0, le=1e3, description="FedProx: strength of the pull towards the round's start")
    staleness_exponent: FiniteFloat = Field(
        0.5,
        ge=0,
        le=10,
        description="FedBuff: exponent a; an update s versions old has weight (1 + s)^-a",
    )
    buffer_size: int = Field(10, ge=1, le=1_000_000, description="FedBuff: K, number of updates per version")

    @property
    def asynchronous(self) -> bool:
        """Whether updates that started from earlier versions are accepted."""
        return self.name == "fedbuff"


class AggregatorSettings(StrictModel):
    """How a round's updates are aggregated."""

    name: AggregatorName = "mean"
    clip_norm: FiniteFloat | None = Field(
        None, gt=0, description="updates with a larger Euclidean norm are scaled down to this norm"
    )
    trim_share: float = Field(
        0.1, ge=0, lt=0.5, description="trimmed_mean: share of values removed at each end of every coordinate"
    )
    krum_f: int = Field(0, ge=0, description="krum, multi_krum: number of updates that may be malicious")


class OptimizerSettings(StrictModel):
    """How the aggregated update, taken as a gradient, changes the shared adapter (Reddi et al., 2021)."""

    name: OptimizerName = "sgd"
    lr: FiniteFloat = Field(1.0, gt=0, le=1e3, description="learning rate; sgd with lr 1 applies the plain mean")
    beta1: float = Field(0.9, ge=0, lt=1, description="momentum, adam")
    beta2: float = Field(0.99, ge=0, lt=1, description="adam")
    eps: FiniteFloat = Field(1e-3, gt=0, description="adam: tau of the paper, its adaptivity")


class CohortRecipe(RequestedRecipe):
    """The recipe settings of a cohort, which all members share but for the estimator.

    With `auto` each member's device gets the estimator that suits it; the cohort's own recipe is chosen when it is
    created, by its settings and not its devices. Masked cohorts, and cohorts with private examples, have one for all.
    """

    estimator: RequestedEstimator = Field(
        "replay", description="auto: gradient, directional or replay, for each member's device in each round"
    )


class CohortSettings(StrictModel):
    """The body of `POST /v1/cohorts`. The settings cannot be changed later."""

    name: str = Field(pattern=NAME, description="name of the cohort and of its shared adapter in the registry")
    base: str = Field(min_length=1, max_length=200, description="name of a registered base model")
    recipe: CohortRecipe = Field(default_factory=CohortRecipe)
    task: TaskName | Task = Field(description="name of a built-in task, or a complete task")
    dataset: str = Field(pattern=NAME, description="name of the dataset in the devices' configuration")
    training: TrainingSettings = Field(
        default_factory=TrainingSettings, description="training settings of one device in a round"
    )
    algorithm: AlgorithmSettings = Field(default_factory=AlgorithmSettings)
    aggregator: AggregatorSettings = Field(default_factory=AggregatorSettings)
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    weights: Weights = Field("equal", description="examples: weight by the number of examples that the device reports")
    most_examples: int = Field(
        1000, ge=1, le=2**31 - 1, description="cap on the number of examples that a device reports"
    )
    norm_limit: FiniteFloat | None = Field(
        None, gt=0, description="updates with a larger Euclidean norm are rejected; null: no limit"
    )
    quorum: int = Field(2, ge=1, le=1_000_000, description="minimum number of updates for a new version")
    deadline_seconds: FiniteFloat = Field(
        24 * 3600.0, gt=0, le=MAX_DEADLINE, description="maximum duration of a round, seconds"
    )
    upload: UploadForm = Field("weights", description="what a device uploads: B, its trajectory, or its masked update")
    masking: SecureAggregationSettings | None = Field(
        None, description="secure aggregation settings; required with upload masked, otherwise null"
    )
    privacy: PrivacySettings | None = Field(
        None, description="privacy of the devices' examples, of the members, or both; null: none"
    )
    membership: Membership = Field("open", description="operator: only operator tokens may add members")
    automatic: bool = Field(False, description="open the next round automatically when the previous one has ended")
    most_rounds: int | None = Field(None, ge=1, le=1_000_000, description="maximum number of rounds; null: no limit")

    @property
    def most_weight(self) -> int:
        """The largest weight of one update."""
        return self.most_examples if self.weights == "examples" else 1

    @property
    def hides_figures(self) -> bool:
        """Whether accuracies, norms and numbers of examples stay secret: the noise on the mean does not cover them."""
        return self.privacy is not None and self.privacy.members is not None

    @model_validator(mode="after")
    def _check_consistency(self) -> CohortSettings:
        name, aggregator = self.algorithm.name, self.aggregator
        if name == "fedprox" and self.algorithm.mu == 0:
            raise ValueError("algorithm fedprox requires mu > 0; set mu, or use fedavg")
        if self.training.proximal:
            raise ValueError("training.proximal is not available in a cohort; use algorithm.mu")
        if self.training.patience is not None:
            raise ValueError("training.patience is not available in a cohort, whose members train all steps")
        if self.algorithm.mu * self.training.lr > 1:
            raise ValueError(
                f"mu {self.algorithm.mu:g} times lr {self.training.lr:g} exceeds 1, which overshoots the start; "
                "lower mu or lr"
            )
        if self.algorithm.asynchronous and self.quorum > self.algorithm.buffer_size:
            raise ValueError("a fedbuff round ends after buffer_size updates; quorum must not exceed buffer_size")
        if aggregator.name in ("krum", "multi_krum") and self.quorum < 2 * aggregator.krum_f + 3:
            raise ValueError(f"{aggregator.name} requires a quorum of at least 2 krum_f + 3; raise quorum")
        if aggregator.name != "mean" and self.weights != "equal":
            raise ValueError(f"aggregator {aggregator.name} ignores weights; it requires weights equal")
        if (self.masking is not None) != (self.upload == "masked"):
            raise ValueError("upload masked and masking must be set together")
        if self.masking is not None:
            if aggregator.clip_norm is None:
                raise ValueError("upload masked requires aggregator.clip_norm, which bounds the effect of an update")
            if self.quorum < self.masking.minimum:
                raise ValueError(
                    f"quorum must be at least masking.minimum ({self.masking.minimum}), the smallest sum of updates"
                )
            if self.most_weight >= 2**24:
                raise ValueError("upload masked requires most_examples below 2^24")
            if aggregator.name != "mean" or self.norm_limit is not None:
                raise ValueError("upload masked hides single updates; it requires aggregator mean and no norm_limit")
            if self.algorithm.asynchronous:
                raise ValueError("upload masked requires one starting version for all members, so not fedbuff")
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        if self.upload == "trajectory" and self.recipe.estimator not in ("auto", *LEDGER_ESTIMATORS):
            raise ValueError("upload trajectory requires a recipe with estimator replay or directional")
        return self

    def _check_privacy(self, privacy: PrivacySettings) -> None:
        if self.weights != "equal":
            raise ValueError("privacy requires weights equal, because the number of examples is private")
        if (privacy.examples is not None) != (self.recipe.privacy == "clipped"):
            raise ValueError("privacy.examples and a recipe with privacy clipped must be set together")
        if privacy.members is None:
            return
        if self.aggregator.name != "mean" or self.upload == "masked":
            raise ValueError("privacy.members adds noise to a clipped mean; it requires aggregator mean and no masking")
        if self.aggregator.clip_norm is not None:
            raise ValueError("privacy.members has its own clip; remove aggregator.clip_norm")


class RoundState(StrEnum):
    """The state of a round."""

    OPEN = "open"  # accepts updates
    AGGREGATING = "aggregating"  # a worker computes the new version
    PUBLISHED = "published"
    ABANDONED = "abandoned"  # below quorum at its end, or the aggregation failed

    @property
    def final(self) -> bool:
        """Whether the state is final."""
        return self in (RoundState.PUBLISHED, RoundState.ABANDONED)


class RoundTask(RoundRef):
    """The round that a device's job belongs to, and its settings."""

    algorithm: AlgorithmSettings
    upload: UploadForm = "weights"
    masking: SecureAggregationParameters | None = Field(
        None, description="secure aggregation parameters of the round, with upload masked"
    )
    privacy: PrivacySettings | None = Field(None, description="differential privacy of the cohort; null: none")
    deadline: datetime = Field(description="end of the round; later updates may be rejected")


class CohortOrigin(StrictModel):
    """How the version of a cohort was aggregated."""

    cohort: str = Field(pattern=NAME)
    round: int = Field(ge=1)
    updates: int = Field(ge=1, description="number of accepted updates")
    algorithm: AlgorithmSettings
    aggregator: AggregatorSettings
    optimizer: OptimizerSettings
    epsilon: float | None = Field(None, ge=0, description="largest epsilon spent on a member so far; null: not private")


class MemberRequest(StrictModel):
    """Adds a user to a cohort, with the device that trains for the user."""

    device: str = Field(min_length=1, max_length=64, description="id of an enrolled device of the tenant")


class MemberView(StrictModel):
    """A member of a cohort."""

    user: str
    device_id: str
    joined_at: datetime
    updates: int = Field(description="number of the member's accepted updates in all rounds")


class RoundView(StrictModel):
    """A round as the API shows it."""

    cohort: str
    number: int
    state: RoundState
    why: str = Field("", description="why the round was abandoned; empty otherwise")
    members: int = Field(description="number of members asked for an update")
    updates: int = Field(description="number of accepted updates")
    start_version: int | None = Field(description="version of the adapter that the round started from; null: B = 0")
    version: int | None = Field(None, description="version of the adapter that the round produced; null: none")
    start_accuracy: float | None = Field(
        None, description="mean accuracy of the starting version on the data of the devices that measured it"
    )
    tuned_accuracy: float | None = Field(
        None, description="mean accuracy of the devices' own results, before aggregation"
    )
    measured: int = Field(0, description="number of devices that reported these accuracies")
    upload_bytes: int = Field(0, description="bytes uploaded for accepted updates")
    opened_at: datetime
    deadline: datetime
    ended_at: datetime | None = None


class UpdateState(StrEnum):
    """The state of a member's update in a round."""

    WAITING = "waiting"  # the device has not finished
    COUNTED = "counted"
    LEFT = "left"  # the member left the cohort
    FAILED = "failed"  # the device reported an error
    MISSED = "missed"  # the round ended first


class UpdateView(StrictModel):
    """A member's update in a round as the API shows it, without the update itself."""

    user: str
    device_id: str
    job_id: str | None = Field(description="job that requests the update; null: not submitted yet")
    state: UpdateState
    claimed_examples: int | None = Field(None, description="number of training examples that the device reported")
    examples: int | None = Field(
        None, description="number of examples used as weight, at most the cohort's most_examples"
    )
    norm: float | None = Field(None, description="Euclidean norm of the update")
    staleness: int | None = Field(None, description="number of versions published since the update's start")
    bytes: int | None = Field(None, description="bytes uploaded")
    start_accuracy: float | None = None
    tuned_accuracy: float | None = None
    updated_at: datetime


class CohortView(StrictModel):
    """A cohort as the API shows it."""

    name: str
    settings: CohortSettings
    task: Task
    recipe: Recipe
    recipe_id: Sha256
    a_sha256: Sha256 = Field(description="sha256 over the frozen A matrices, which all members share")
    size_d: int = Field(description="D: number of elements of flat B")
    members: int
    rounds: int = Field(description="number of rounds opened so far")
    round: RoundView | None = Field(description="the latest round; null: none was opened")
    version: int | None = Field(description="version that the next round starts from; null: none yet")
    created_at: datetime


class RoundReceipt(StrictModel):
    """The response of `complete` to a device whose update was accepted into a round."""

    cohort: str
    round: int
    updates: int = Field(description="number of accepted updates so far")
