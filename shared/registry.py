"""JSON models of the adapter registry: manifests, approval, the audit trail and comparisons.

A manifest holds facts that never change; its sha256 names the version (`revision`). State and `main` can change
later and are not part of it.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import Field, FiniteFloat

from shared.canonical import canonical_json, sha256_hex
from shared.federation.cohort import CohortOrigin
from shared.recipe import BaseRef, Recipe, Sha256
from shared.result import Result
from shared.strict_model import StrictModel
from shared.task import Task, TextMetric
from shared.training_settings import TrainingSettings

REVISION_DIGITS = 40
MIN_PREFIX = 7  # minimum digits of an abbreviated revision
MAIN = "main"
EARLIER_MARGIN = 0.02  # how far the accuracy on earlier jobs' records may fall, if the rule's margin is smaller


class VersionState(StrEnum):
    """The state of a version."""

    HELD = "held"  # waits for approval; available by number or revision, never as `main`
    APPROVED = "approved"
    DEPRECATED = "deprecated"  # by earlier releases; still available, with a message
    DELETED = "deleted"  # not available; can be restored until it is purged


class Parent(StrictModel):
    """The version that a training run started from."""

    adapter: str
    version: int = Field(ge=1)
    revision: str = Field(pattern=rf"^[0-9a-f]{{{REVISION_DIGITS}}}$")


class AdapterManifest(StrictModel):
    """The origin and the contents of a version."""

    format: Literal[1] = 1
    tenant: str
    adapter: str
    version: int = Field(ge=1)
    user: str
    base: BaseRef
    recipe: Recipe
    recipe_id: Sha256
    a_sha256: Sha256 = Field(description="over the frozen A matrices")
    sha256: Sha256 = Field(description="of the LoRA-B safetensors file")
    size: int = Field(ge=0, description="its bytes")
    size_d: int = Field(ge=1, description="D: elements of flat B")
    job_id: str | None = Field(description="null: a cohort's round made it")
    device_id: str | None = Field(description="null: a cohort's round made it")
    parent: Parent | None = Field(None, description="null: trained from B = 0")
    # Omitted when null, so that manifests signed before cohorts existed keep their bytes.
    cohort: CohortOrigin | None = Field(
        None, exclude_if=lambda value: value is None, description="the round that made it; null: one device trained it"
    )
    task: Task
    training: TrainingSettings
    result: Result = Field(description="with the evaluation on the device; of a round: sums and means of its members'")
    created_at: datetime

    def canonical(self) -> bytes:
        """Returns the bytes that are signed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def revision(self) -> str:
        """The first 40 hexadecimal digits of the sha256 of the canonical JSON."""
        return sha256_hex(self.canonical())[:REVISION_DIGITS]


class SignedAdapter(StrictModel):
    """A manifest and the server's Ed25519 signature over its canonical JSON."""

    manifest: AdapterManifest
    key_id: str
    signature: str = Field(description="Ed25519, base64")


class ApprovalRule(StrictModel):
    """Which new versions are approved automatically. All others are held for a person's approval."""

    automatic: bool = Field(True, description="false: a person approves each version")
    margin: FiniteFloat = Field(
        0,
        ge=0,
        le=1,
        description="how far the score on the device may fall, or be below the device's baselines (0.01: one point)",
    )
    metric: Literal["loss"] | TextMetric = Field(
        "loss",
        exclude_if=lambda metric: metric == "loss",
        description="by what a version that writes text is judged: its held-out loss per token must fall, or a score "
        "of its texts must not fall by more than the margin",
    )
    max_increase: FiniteFloat = Field(
        0.02,
        ge=0,
        le=1,
        exclude_if=lambda value: value == 0.02,
        description="share by which a version that learned from preferences may raise the loss per token of answers "
        "that people liked (0.02: two percent)",
    )
    max_reference_increase: FiniteFloat | None = Field(
        0.05,
        ge=0,
        le=100,
        exclude_if=lambda value: value == 0.05,
        description="share by which a version may raise the loss of the reference texts, `reference_loss_change` of "
        "its result (0.05: five percent); null: by any share",
    )
    unmeasured: Literal["hold", "approve"] = Field("hold", description="a version whose device measured no score")

    def objection(self, result: Result, parent_score: float | None) -> str | None:
        """Returns why a version is held, or None if it is approved.

        parent_score: the accuracy of the parent version, if known. The device's own measurement before training also
        counts as the parent's, on the same data. The new version must not fall below either, or below the device's
        baselines, by more than the margin, nor on the records of earlier jobs by more than that or EARLIER_MARGIN. A
        version that is its start is held whatever the rule says of scores, and so is one that has raised the loss of
        the reference texts by too much.
        """
        if not self.automatic:
            return "a person approves each version of this adapter"
        if result.steps > 0 and result.best_step == 0:
            return (
                "the adapter is no better than its start: no measurement after the first step was better; try another "
                "lr, more steps or more records"
            )
        if (objection := self.reference_objection(result)) is not None:
            return objection
        if result.preference_margin is not None:
            return self._objection_to_preferences(result)
        if result.perplexities is not None:
            return self._objection_to_texts(result)
        before = [score for score in (result.before_accuracy, parent_score) if score is not None]
        objection = self._objection_to_scores(before, result.tuned_accuracy) or self._objection_to_baseline(result)
        return objection or self._objection_to_earlier(result)

    def reference_objection(self, result: Result) -> str | None:
        """As `objection`, for a version that has lost general language."""
        change, limit = result.reference_loss_change, self.max_reference_increase
        if change is None or limit is None or change <= limit:
            return None
        return (
            f"the loss of the reference texts rose by {change:.1%}, more than the {limit:.1%} that the rule allows; "
            "use fewer steps, a lower lr or more records"
        )

    def _objection_to_earlier(self, result: Result) -> str | None:
        """As `objection`, for a version that has become worse on the records of the jobs before it."""
        before, after = result.earlier_accuracy_before, result.earlier_accuracy_after
        if before is None or after is None or before - after <= max(self.margin, EARLIER_MARGIN) + 1e-9:
            return None
        return f"the score on the records of earlier jobs fell from {before:.1%} to {after:.1%}"

    def _objection_to_baseline(self, result: Result) -> str | None:
        """As `objection`, against simple classifiers that the device trained on the same records."""
        baselines = {
            "always choosing the most frequent answer": result.majority_accuracy,
            "a logistic regression on n-grams": result.baseline_accuracy,
        }
        tuned = result.tuned_accuracy
        for name, accuracy in baselines.items():
            if accuracy is not None and tuned is not None and accuracy - tuned > self.margin + 1e-9:
                return f"the score {tuned:.1%} is below the {accuracy:.1%} of {name}"
        return None

    def _objection_to_preferences(self, result: Result) -> str | None:
        """As `objection`, for a task of kind preference: the adapter is compared with its own start."""
        tuned, before, after = result.tuned_accuracy or 0.0, result.token_loss_before, result.token_loss_after
        if tuned <= 0.5:
            return f"the preferred answer has gained on the other one in {tuned:.1%} of the held-out records only"
        if before is not None and after is not None and after > before * (1 + self.max_increase):
            return (
                f"the loss per token of answers that people liked rose from {before:.3f} to {after:.3f}, by more than "
                f"{self.max_increase:.0%}; use fewer steps, a lower lr or a larger beta"
            )
        return None

    def _objection_to_texts(self, result: Result) -> str | None:
        """As `objection`, for a task that writes text."""
        if self.metric == "loss":
            before, after = result.token_loss_before, result.token_loss_after
            if before is None or after is None or after < before:
                return None
            return f"the loss per token did not fall: {before:.3f} before, {after:.3f} after"
        values = [getattr(scores, self.metric) for scores in (result.written_before, result.written_after) if scores]
        return self._objection_to_scores(values[:1], values[1] if len(values) == 2 else None, self.metric)

    def _objection_to_scores(self, before: list[float], after: float | None, name: str = "score") -> str | None:
        if after is None or not before:
            return None if self.unmeasured == "approve" else f"the device measured no {name} before and after"
        # Allow for rounding: 0.8 - 0.75 is slightly more than 0.05 in floating point.
        if max(before) - after > self.margin + 1e-9:
            return f"the {name} fell from {max(before):.1%} to {after:.1%}"
        return None


class RuleChange(StrictModel):
    """Sets the rule of a tenant or an adapter; null: inherit from the tenant or the server."""

    rule: ApprovalRule | None


class RuleView(StrictModel):
    """The effective rule and where it is set."""

    rule: ApprovalRule
    source: Literal["adapter", "tenant", "server"]


class Decision(StrictModel):
    """A person's decision about a version, with a reason."""

    reason: str = Field("", max_length=1000, description="for the audit trail")


class Promotion(Decision):
    """Makes an approved version `main`."""

    revision: str = Field(max_length=100, description="number or revision")


class AdapterAction(StrEnum):
    """An action in an adapter's audit trail."""

    PUBLISHED = "published"
    HELD = "held"
    APPROVED = "approved"
    REJECTED = "rejected"  # of earlier releases; a person deletes the held version
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled-back"  # of earlier releases; a person promotes the earlier version
    TAGGED = "tagged"  # of earlier releases
    UNTAGGED = "untagged"  # of earlier releases
    DEPRECATED = "deprecated"  # of earlier releases
    DELETED = "deleted"
    UNDELETED = "undeleted"
    REMOVED = "removed"
    RULE_CHANGED = "rule-changed"
    # Actions on the cohort that the adapter belongs to.
    COHORT_CREATED = "cohort-created"
    JOINED = "joined"
    LEFT = "left"
    ROUND_OPENED = "round-opened"
    ROUND_CLOSED = "round-closed"
    ROUND_ABANDONED = "round-abandoned"


class AdapterEvent(StrictModel):
    """One entry of the audit trail: who did what, when and why."""

    at: datetime
    actor: str = Field(description="id of a token or device; `server`: itself")
    name: str = Field(description="the token's name, for people")
    user: str | None = Field(description="whose token it is, if a person's")
    action: AdapterAction
    version: int | None
    main_before: int | None = Field(description="the version that was `main`, where the action moved it")
    main_after: int | None
    tag: str | None = Field(None, description="of earlier releases")
    reason: str = ""


class VersionRef(StrictModel):
    """One side of a comparison."""

    adapter: str
    version: int
    revision: str


class Difference(StrictModel):
    """A setting with different values in two versions."""

    field: str
    left: Any
    right: Any


class ScoreDifference(StrictModel):
    """A metric of both results; `difference` is right minus left."""

    field: str
    left: float | None
    right: float | None
    difference: float | None


class Comparison(StrictModel):
    """Two versions compared."""

    left: VersionRef
    right: VersionRef
    same_base: bool
    same_a: bool
    recipe: list[Difference]
    task: list[Difference]
    training: list[Difference]
    scores: list[ScoreDifference]
