"""The client's scoring and generating on the server. Knows the two routes; shared.scoring says what they take."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mobizo.connection import Connection
from shared.errors import MobizoError, from_problem
from shared.scoring import GeneratedText, GenerateRequest, GenerateResult, ScoreRequest, ScoreResult


class Scoring(Connection):
    """Adapters of one tenant at work on the server, for those who have no device."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        """How likely each row's answers are, with each row's own adapter, in one batch."""
        body = request.model_dump(mode="json", exclude_unset=True)
        return ScoreResult.model_validate(self._transport.request("POST", "/v1/score", json=body).json())

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """What follows a prompt, once it is whole."""
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": False}
        return GenerateResult.model_validate(self._transport.request("POST", "/v1/generate", json=body).json())

    def stream(self, request: GenerateRequest) -> Iterator[str | GenerateResult]:
        """The same piece by piece, as it comes; the whole is last. Raises what ended a stream before its end."""
        body = request.model_dump(mode="json", exclude_unset=True) | {"stream": True}
        for event, _, data in self._transport.events("/v1/generate", body=body):
            if event == "text":
                yield GeneratedText.model_validate_json(data).text
            elif event == "end":
                yield GenerateResult.model_validate_json(data)
                return
            elif event == "problem":
                raise from_problem(json.loads(data))
        raise MobizoError("the server ended the text before its end; ask again")
