"""Compares two versions: their settings, their scores, and the distance of their B."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel

from server.database.database import Database
from server.registry.files import flat_b
from server.registry.repository import resolve
from server.storage.store import ArtifactStore
from shared.job import TextScores
from shared.registry import (
    AdapterManifest,
    Comparison,
    Difference,
    ScoreDifference,
    VersionRef,
    WeightsComparison,
)
from shared.zo.lora import F32

ACCURACIES = ("zero_shot_accuracy", "start_accuracy", "tuned_accuracy")
TOKEN_LOSSES = ("token_loss_before", "token_loss_after")
TEXT_SCORES = ("exact_match", "token_f1", "rouge_l")
FIGURES = ("steps", "best_step", "train_examples")
_CHUNK = 1 << 18  # elements converted to float64 at once


def compare_revisions(
    database: Database, artifacts: ArtifactStore, tenant: str, left: tuple[str, str], right: tuple[str, str]
) -> Comparison:
    """Compares two versions of a tenant, each named by (adapter, revision), outside of any transaction.

    Raises AdapterNotFound, RevisionNotFound or Damaged.
    """
    with database.reading() as session:
        _, first = resolve(session, tenant, *left)
        _, second = resolve(session, tenant, *right)
        session.expunge_all()
    facts = first.signed.manifest, second.signed.manifest
    weights = None
    if comparable(*facts):
        left_b, right_b = (flat_b(database, artifacts, version) for version in (first, second))
        weights = compare_weights(left_b, right_b)
    return compare(*facts, weights)


def compare(left: AdapterManifest, right: AdapterManifest, weights: WeightsComparison | None) -> Comparison:
    """Returns the differences of two manifests. weights: the comparison of their B, if possible."""
    return Comparison(
        left=_ref(left),
        right=_ref(right),
        same_base=left.base.sha256 == right.base.sha256,
        same_a=left.a_sha256 == right.a_sha256,
        recipe=list(_differences(left.recipe, right.recipe)),
        task=list(_differences(left.task, right.task)),
        training=list(_differences(left.training, right.training)),
        scores=[
            *(
                _score(name, getattr(left.result, name), getattr(right.result, name))
                for name in (*(TOKEN_LOSSES if left.task.generates or right.task.generates else ACCURACIES), *FIGURES)
            ),
            *_text_scores(left.result.written_after, right.result.written_after),
        ],
        weights=weights,
    )


def _text_scores(left: TextScores | None, right: TextScores | None) -> Iterator[ScoreDifference]:
    """Yields the scores of written texts, if either side has any."""
    if left is not None or right is not None:
        for name in TEXT_SCORES:
            scores = [None if side is None else float(getattr(side, name)) for side in (left, right)]
            yield _score(name, *scores)


def comparable(left: AdapterManifest, right: AdapterManifest) -> bool:
    """Returns whether both B belong to the same A, so that their elements can be compared."""
    return (left.a_sha256, left.size_d) == (right.a_sha256, right.size_d)


def compare_weights(left: F32, right: F32) -> WeightsComparison:
    """Compares two flat B (D,) in double precision."""
    dot = lefts = rights = apart = 0.0
    for at in range(0, len(left), _CHUNK):
        a, b = left[at : at + _CHUNK].astype(np.float64), right[at : at + _CHUNK].astype(np.float64)
        dot, lefts, rights = dot + float(a @ b), lefts + float(a @ a), rights + float(b @ b)
        apart += float((b - a) @ (b - a))
    product = math.sqrt(lefts * rights)
    return WeightsComparison(
        cosine=max(-1.0, min(1.0, dot / product)) if product else None,
        left_norm=math.sqrt(lefts),
        right_norm=math.sqrt(rights),
        difference_norm=math.sqrt(apart),
    )


def _ref(manifest: AdapterManifest) -> VersionRef:
    return VersionRef(adapter=manifest.adapter, version=manifest.version, revision=manifest.revision)


def _differences(left: BaseModel, right: BaseModel) -> Iterator[Difference]:
    first, second = (dict(flattened(side.model_dump(mode="json"))) for side in (left, right))
    for name in sorted(first.keys() | second.keys()):
        if first.get(name) != second.get(name):
            yield Difference(field=name, left=first.get(name), right=second.get(name))


def flattened(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the values of a nested document with their dotted names."""
    for name, value in document.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _score(name: str, left: float | None, right: float | None) -> ScoreDifference:
    difference = None if left is None or right is None else right - left
    return ScoreDifference(field=name, left=left, right=right, difference=difference)
