"""Scoring and generation requests: resolves names in the database, calls the scorer, builds the API's result.

No transaction and no thread is held while the scorer works.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio.to_thread
from anyio import CapacityLimiter
from tokenizers import Tokenizer

from server.inference.frames import ServedAdapterRef, TextToGenerate
from server.inference.scorer import make_scorer
from server.inference.service import (
    Call,
    ReadRow,
    ResolvedTarget,
    ScoringService,
    TextRequest,
    calls_of,
    refs_of,
    text_to_generate,
)
from server.registry.trajectories.reconstruction import b_file
from server.web.state import AppState
from shared.generated_text import Piece, TextPieces
from shared.scoring import GenerateResult, ScoreRequest, ScoreResult

READERS = 2  # requests whose texts are tokenized at the same time


def _make_readers(state: AppState) -> CapacityLimiter:
    return CapacityLimiter(READERS)


async def score(state: AppState, tenant: str, request: ScoreRequest) -> ScoreResult:
    """Scores every row of a request. Raises the errors of the request or of the scorer.

    Stops when it is cancelled, also while the texts are tokenized.
    """
    disconnected = threading.Event()
    try:
        rows, calls = await anyio.to_thread.run_sync(
            _read_rows,
            state,
            tenant,
            request,
            disconnected.is_set,
            limiter=state.get(_make_readers),
            abandon_on_cancel=True,
        )
    finally:
        disconnected.set()
    scores = [[0.0] * len(row.rows) for row in rows]
    requests = [asyncio.ensure_future(_ask(state, tenant, call, scores)) for call in calls]
    try:
        await asyncio.gather(*requests)
    finally:
        for each in requests:
            each.cancel()
    return ScoreResult(rows=tuple(row.result(row_scores) for row, row_scores in zip(rows, scores, strict=True)))


def _read_rows(
    state: AppState, tenant: str, request: ScoreRequest, cancelled: Callable[[], bool]
) -> tuple[list[ReadRow], list[Call]]:
    with state.database.reading() as session:
        service = ScoringService(session, state.artifacts, tenant)
        rows = service.read(request, state.settings.scorer_request_tokens, cancelled)
        session.expunge_all()
    for target in {id(row.target): row.target for row in rows}.values():
        _put_there(state, target)
    return rows, calls_of(rows)


def _put_there(state: AppState, target: ResolvedTarget) -> None:
    """Makes sure that the adapter file is stored, since the scorer reads it from there."""
    if target.version is not None:
        b_file(state.database, state.artifacts, target.version)


async def _ask(state: AppState, tenant: str, call: Call, scores: list[list[float]]) -> None:
    """Writes the scorer's results into `scores` by row and answer."""
    call_scores = await state.get(make_scorer).score(tenant, call.base, call.adapters, call.texts)
    for (row, answers), text in zip(call.where, call_scores, strict=True):
        for answer, value in zip(answers, text, strict=True):
            scores[row][answer] = value


class TextGeneration:
    """One text being generated. prompt_tokens and tokenizer are known with the first piece."""

    tokenizer: Tokenizer

    def __init__(self, state: AppState, tenant: str, request: TextRequest) -> None:
        self._state, self._tenant, self.request = state, tenant, request
        self.prompt_tokens = 0

    async def pieces(self) -> AsyncGenerator[Piece | GenerateResult, None]:
        """Yields pieces of the text, then the whole result. Raises the errors of the request or of the scorer.

        Close the iterator to cancel.
        """
        target, adapters, prompt, self.tokenizer = await anyio.to_thread.run_sync(
            self._read, limiter=self._state.get(_make_readers)
        )
        self.prompt_tokens = len(prompt.tokens)
        text = TextPieces(
            self.tokenizer, prompt.tokens, self.request.stop, keep_textless=self.request.likeliest is not None
        )
        finish = "stop"
        async with aclosing(
            self._state.get(make_scorer).generate(self._tenant, target.base_ref, adapters, prompt)
        ) as generated:
            async for token in generated:
                if isinstance(token, str):
                    finish = token
                    break
                if piece := text.push(token):
                    yield piece
                if text.stopped:
                    break
        if piece := text.finish():
            yield piece
        result = {"text": text.text, "tokens": text.tokens, "finish": "stop" if text.stopped else finish}
        yield GenerateResult.model_validate(target.scored_by | result)

    def _read(self) -> tuple[ResolvedTarget, list[ServedAdapterRef], TextToGenerate, Tokenizer]:
        with self._state.database.reading() as session:
            service = ScoringService(session, self._state.artifacts, self._tenant)
            request = self.request
            target = (
                service.resolve_target(request, request.adapter)
                if request.model is None
                else service.resolve_model(request.model)
            )
            tokenizer = service.tokenizer(target)
            session.expunge_all()
        _put_there(self._state, target)
        return target, refs_of(target), text_to_generate(self.request, target, tokenizer), tokenizer
