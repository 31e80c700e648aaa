"""The client's scoring and generating on the server. Knows the two routes; shared.scoring says what they take."""

from __future__ import annotations

from mobizo.connection import Connection
from shared.scoring import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult


class Scoring(Connection):
    """Adapters of one tenant at work on the server, for those who have no device."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        """How likely each row's answers are, with each row's own adapter, in one batch."""
        body = request.model_dump(mode="json", exclude_defaults=True)
        return ScoreResult.model_validate(self._transport.request("POST", "/v1/score", json=body).json())

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """What follows a prompt, once it is whole."""
        body = request.model_dump(mode="json", exclude_defaults=True) | {"stream": False}
        return GenerateResult.model_validate(self._transport.request("POST", "/v1/generate", json=body).json())
