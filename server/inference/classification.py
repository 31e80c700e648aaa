"""Classifies records with an adapter, whose own task makes the prompt and has the labels."""

from __future__ import annotations

from fastapi.concurrency import run_in_threadpool

from server.inference import responses
from server.registry.models import StoredVersion
from server.registry.repository import resolve
from server.web.state import AppState
from shared.registry import MAIN
from shared.scoring import ClassifyRequest, ClassifyResult, ScoreRequest, ScoreRow


async def classify(state: AppState, tenant: str, adapter: str, request: ClassifyRequest) -> ClassifyResult:
    """Scores the labels for a record, as `POST /v1/score` does. adapter: NAME or NAME@REVISION.

    Raises the errors of `ClassifyRequest.record` and `responses.score`.
    """
    name, version = await run_in_threadpool(_resolve, state, tenant, adapter)
    task = version.manifest.task
    row = ScoreRow(adapter=f"{name}@{version.revision}", record=request.record(task))
    (result,) = (await responses.score(state, tenant, ScoreRequest(task=task, rows=(row,)))).rows
    scores = [(answer.label or answer.text, answer.probability, answer.log_probability) for answer in result.answers]
    return ClassifyResult.of(result, scores)


def _resolve(state: AppState, tenant: str, adapter: str) -> tuple[str, StoredVersion]:
    name, _, revision = adapter.partition("@")
    with state.database.reading() as session:
        _, version = resolve(session, tenant, name, revision or MAIN)
        session.expunge_all()
    return name, version
