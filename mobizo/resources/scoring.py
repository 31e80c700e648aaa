"""`client.scoring`: score answers and generate text on the server with any adapter of the tenant."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.errors import MobizoError, from_problem
from shared.scoring import GeneratedText, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult


class Scoring:
    """Inference on the server. Methods raise AdapterNotFound or RevisionNotFound for an unknown adapter."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the log-probability of each row's answers. All rows run in one batch, each with its own adapter."""
        body = request.model_dump(mode="json", exclude_unset=True)
        return ScoreResult.model_validate(self._connection.send("POST", "/v1/score", body))

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generates text after a prompt and returns it when it is complete."""
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": False}
        return GenerateResult.model_validate(self._connection.send("POST", "/v1/generate", body))

    def stream(self, request: GenerateRequest) -> Iterator[str | GenerateResult]:
        """Generates text after a prompt: yields each piece as it arrives, and at the end the complete result.

        Raises the error with which the server ends the stream, or MobizoError if the stream breaks off.
        """
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": True}
        for event, _, data in self._connection.transport.events("/v1/generate", body=body):
            if event == "text":
                yield GeneratedText.model_validate_json(data).text
            elif event == "end":
                yield GenerateResult.model_validate_json(data)
                return
            elif event == "problem":
                raise from_problem(json.loads(data))
        raise MobizoError("the server closed the stream before the text was complete; try again")
