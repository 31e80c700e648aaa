"""What the adapter registry says of a version: its manifest and signature, its state, what two versions differ in.

A manifest holds facts that never change; its sha256 names the version (`revision`). What people decide later (state,
tags, `main`) is not in it. Knows no HTTP, no database.
"""

from __future__ import annotations

import re
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from shared.canonical import canonical_json, sha256_hex
from shared.cohort import CohortOrigin
from shared.job import Result, TrainingSettings
from shared.recipe import BaseRef, Recipe, Sha256
from shared.task import Task

REVISION_DIGITS = 40
LEAST_PREFIX = 7  # digits of a revision that may stand for all 40
MAIN = "main"
# A tag must not read as any other way to name a version.
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_TAKEN = re.compile(rf"{MAIN}|HEAD|v?[0-9]+|[0-9a-fA-F]{{{LEAST_PREFIX},{REVISION_DIGITS}}}")


class VersionState(StrEnum):
    """What people or rules decided of a version."""

    HELD = "held"  # waits for a person; to be had by its number or revision, never as `main`
    APPROVED = "approved"
    DEPRECATED = "deprecated"  # to be had still, with a message
    DELETED = "deleted"  # not to be had; may be taken back until it is removed


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Parent(_Fact):
    """The version that a training run began from."""

    adapter: str
    version: int = Field(ge=1)
    revision: str = Field(pattern=rf"^[0-9a-f]{{{REVISION_DIGITS}}}$")


class AdapterManifest(_Fact):
    """Where a version comes from and what it is."""

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
    # Absent where null, so that the manifests signed before there were cohorts keep their bytes.
    cohort: CohortOrigin | None = Field(
        None, exclude_if=lambda value: value is None, description="the round that made it; null: one device trained it"
    )
    task: Task
    training: TrainingSettings
    result: Result = Field(description="with the evaluation on the device; of a round: sums and means of its members'")
    created_at: datetime

    def canonical(self) -> bytes:
        """The bytes that are signed."""
        return canonical_json(self.model_dump(mode="json"))

    @property
    def revision(self) -> str:
        """The first 40 hexadecimal digits of the sha256 of the canonical JSON."""
        return sha256_hex(self.canonical())[:REVISION_DIGITS]


class SignedAdapter(_Fact):
    """A manifest and the server's Ed25519 signature over its canonical JSON."""

    manifest: AdapterManifest
    key_id: str
    signature: str = Field(description="Ed25519, base64")


def check_tag(name: str) -> str:
    """`name`, if a tag may be called so. Raises ValueError."""
    if not _TAG.fullmatch(name):
        raise ValueError("a tag is up to 96 letters, digits, dots, underscores and hyphens, a letter or digit first")
    if _TAKEN.fullmatch(name):
        raise ValueError("a tag must not read as `main`, a version's number or a revision")
    return name


class ApprovalRule(_Fact):
    """Which new versions are approved by themselves; the others are held for a person."""

    automatic: bool = Field(True, description="false: a person approves each version")
    margin: float = Field(
        0, ge=0, le=1, allow_inf_nan=False, description="how far the score on the device may fall (0.01: one point)"
    )
    unmeasured: Literal["hold", "approve"] = Field("hold", description="a version whose device measured no score")

    def objection(self, result: Result, parent_score: float | None) -> str | None:
        """Why a version is held, in words; None: it is approved.

        parent_score: the accuracy that the parent version reached, if there is a parent that says so. The device's own
        measurement before training is the parent's, too, on the same data; a version must fall behind neither.
        """
        if not self.automatic:
            return "a person approves each version of this adapter"
        before = [score for score in (result.before_accuracy, parent_score) if score is not None]
        if result.tuned_accuracy is None or not before:
            return None if self.unmeasured == "approve" else "the device measured no score before and after"
        fall = max(before) - result.tuned_accuracy
        # A share of few examples is no exact decimal: 0.8 - 0.75 is a little more than 0.05.
        if fall > self.margin + 1e-9:
            return f"the score fell from {max(before):.1%} to {result.tuned_accuracy:.1%}"
        return None


class RuleChange(_Wire):
    """Sets the rule of a tenant or an adapter; null: as the one above it, tenant or server."""

    rule: ApprovalRule | None


class RuleView(_Wire):
    """The rule that holds, and whose it is."""

    rule: ApprovalRule
    source: Literal["adapter", "tenant", "server"]


class Decision(_Wire):
    """What a person does to a version, and why."""

    reason: str = Field("", max_length=1000, description="for the audit trail")


class Promotion(Decision):
    """Makes an approved version `main`."""

    revision: str = Field(max_length=100, description="number, tag or revision")


class Rollback(Decision):
    """Makes an earlier version `main` again."""

    revision: str | None = Field(None, max_length=100, description="null: what `main` was before")


class Deprecation(Decision):
    """Tells people who use a version to leave it."""

    message: str = Field(min_length=1, max_length=1000, description="shown with the version")


class Tagging(Decision):
    """Puts a tag on a version, or moves it there."""

    revision: str = Field(max_length=100, description="number, tag, revision or `main`")


class AdapterAction(StrEnum):
    """What happened to an adapter, in the audit trail's words."""

    PUBLISHED = "published"
    HELD = "held"
    APPROVED = "approved"
    REJECTED = "rejected"
    PROMOTED = "promoted"
    ROLLED_BACK = "rolled-back"
    TAGGED = "tagged"
    UNTAGGED = "untagged"
    DEPRECATED = "deprecated"
    DELETED = "deleted"
    UNDELETED = "undeleted"
    REMOVED = "removed"
    RULED = "ruled"
    # Of a cohort, whose adapter this is.
    COHORT_MADE = "cohort-made"
    JOINED = "joined"
    LEFT = "left"
    ROUND_OPENED = "round-opened"
    ROUND_CLOSED = "round-closed"
    ROUND_ABANDONED = "round-abandoned"


class AdapterEvent(_Wire):
    """One line of the audit trail: who did what, when and why."""

    at: datetime
    actor: str = Field(description="id of a token or device; `server`: itself")
    name: str = Field(description="the token's name, for people")
    user: str | None = Field(description="whose token it is, if a person's")
    action: AdapterAction
    version: int | None
    main_before: int | None = Field(description="the version that was `main`, where the action moved it")
    main_after: int | None
    tag: str | None = None
    reason: str = ""


class VersionRef(_Wire):
    """One side of a comparison."""

    adapter: str
    version: int
    revision: str


class Difference(_Wire):
    """A setting that two versions differ in."""

    field: str
    left: Any
    right: Any


class ScoreDifference(_Wire):
    """A figure of both sides' results; `difference` is right minus left."""

    field: str
    left: float | None
    right: float | None
    difference: float | None


class WeightsComparison(_Wire):
    """Two flat B (D,) over the same A."""

    cosine: float | None = Field(description="null: one of them is zero")
    left_norm: float
    right_norm: float
    difference_norm: float = Field(description="Euclidean norm of right minus left")


class Comparison(_Wire):
    """Two versions side by side."""

    left: VersionRef
    right: VersionRef
    same_base: bool
    same_a: bool
    recipe: list[Difference]
    task: list[Difference]
    training: list[Difference]
    scores: list[ScoreDifference]
    weights: WeightsComparison | None = Field(description="null: A or D differ, so that the numbers would say nothing")
