"""`client.scoring`: score answers on the server with any adapter of the tenant."""

from __future__ import annotations

from typing import Any

from mobizo.adapter_paths import adapter_path, revision_segment, split_reference
from mobizo.connection import Resource
from shared.scoring import ClassifyRequest, ClassifyResult, ScoreRequest, ScoreResult


class Scoring(Resource):
    """Scoring on the server. OpenAI's client generates texts, at `BASE_URL/v1`."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the log-probability of each row's answers. All rows run in one batch, each with its own adapter."""
        body = request.model_dump(mode="json", exclude_unset=True)
        return self._connection.send(ScoreResult, "POST", "/v1/score", body)

    def classify(self, adapter: str, fields: dict[str, Any]) -> ClassifyResult:
        """Returns the labels of a record by an adapter's own task, with probabilities. adapter: NAME or NAME@REVISION.

        Raises InvalidRequest if a field that the task needs is missing.
        """
        name, revision = split_reference(adapter)
        path = adapter_path(name) + (f"@{revision_segment(name, revision)}" if revision else "")
        body = ClassifyRequest(fields=fields).model_dump(mode="json")
        return self._connection.send(ClassifyResult, "POST", f"{path}/classify", body)
