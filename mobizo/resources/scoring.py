"""`client.scoring`: score answers on the server with any adapter of the tenant."""

from __future__ import annotations

from mobizo.connection import Connection
from shared.scoring import ScoreRequest, ScoreResult


class Scoring:
    """Scoring on the server. OpenAI's client generates texts, at `BASE_URL/v1`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the log-probability of each row's answers. All rows run in one batch, each with its own adapter."""
        body = request.model_dump(mode="json", exclude_unset=True)
        return ScoreResult.model_validate(self._connection.send("POST", "/v1/score", body))
