"""Compares two versions: their settings and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from sqlalchemy.orm import Session

from server.registry.repository import resolve
from shared.registry import AdapterManifest, Comparison, Difference, ScoreDifference, VersionRef
from shared.result import TextScores

ACCURACIES = ("zero_shot_accuracy", "start_accuracy", "tuned_accuracy")
TOKEN_LOSSES = ("token_loss_before", "token_loss_after")
TEXT_SCORES = ("exact_match", "token_f1", "rouge_l")
FIGURES = ("steps", "best_step", "train_examples")


def compare_revisions(session: Session, tenant: str, left: tuple[str, str], right: tuple[str, str]) -> Comparison:
    """Compares two versions of a tenant, each named by (adapter, revision).

    Raises AdapterNotFound or RevisionNotFound.
    """
    first, second = (resolve(session, tenant, *side)[1].signed.manifest for side in (left, right))
    return compare(first, second)


def compare(left: AdapterManifest, right: AdapterManifest) -> Comparison:
    """Returns the differences of two manifests."""
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
    )


def _text_scores(left: TextScores | None, right: TextScores | None) -> Iterator[ScoreDifference]:
    """Yields the scores of written texts, if either side has any."""
    if left is not None or right is not None:
        for name in TEXT_SCORES:
            scores = [None if side is None else float(getattr(side, name)) for side in (left, right)]
            yield _score(name, *scores)


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
