"""`client.scoring`: score answers and generate text on the server with any adapter of the tenant."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.errors import MobizoError, from_problem
from shared.openai.models import Completion, CompletionRequest
from shared.scoring import ScoreRequest, ScoreResult


class Scoring:
    """Inference on the server. A model is an adapter, `NAME` or `NAME@REVISION`, or a base model."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Returns the log-probability of each row's answers. All rows run in one batch, each with its own adapter."""
        body = request.model_dump(mode="json", exclude_unset=True)
        return ScoreResult.model_validate(self._connection.send("POST", "/v1/score", body))

    def generate(self, request: CompletionRequest) -> Completion:
        """Generates texts after the request's prompts and returns them when they are complete."""
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": False}
        return Completion.model_validate(self._connection.send("POST", "/v1/completions", body))

    def stream(self, request: CompletionRequest) -> Iterator[Completion]:
        """Generates texts after the request's prompts and yields each piece as it arrives.

        Raises the error with which the server ends the stream, or MobizoError if the stream breaks off.
        """
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": True}
        for _, _, data in self._connection.transport.events("/v1/completions", body=body):
            if data == "[DONE]":
                return
            chunk = json.loads(data)
            if "error" in chunk:
                raise from_problem(chunk)
            yield Completion.model_validate(chunk)
        raise MobizoError("the server closed the stream before the text was complete; try again")
