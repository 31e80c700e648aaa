"""A request's way to its answer: looked up in the database, put to the scorer, told as the API tells it.

Holds no transaction and no thread while the scorer works. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi.concurrency import run_in_threadpool
from tokenizers import Tokenizer

from server.history.remaking import b_file
from server.http.place import Place
from server.scoring.frames import ServedAdapterRef, TextToGrow
from server.scoring.service import (
    Call,
    Met,
    ReadRow,
    ScoringService,
    calls_of,
    refs_of,
    text_to_grow,
)
from server.scoring.texts import StoppingText
from shared.scoring import GenerateRequest, GenerateResult, ScoreRequest, ScoreResult


async def score(place: Place, tenant: str, request: ScoreRequest) -> ScoreResult:
    """Every row's scores. Raises what is wrong with the request, or with the scorer."""
    rows, calls = await run_in_threadpool(_read_rows, place, tenant, request)
    scores = [[0.0] * len(row.rows) for row in rows]
    asking = [asyncio.ensure_future(_ask(place, tenant, call, scores)) for call in calls]
    try:
        await asyncio.gather(*asking)
    finally:
        for each in asking:
            each.cancel()
    return ScoreResult(rows=tuple(row.result(found) for row, found in zip(rows, scores, strict=True)))


def _read_rows(place: Place, tenant: str, request: ScoreRequest) -> tuple[list[ReadRow], list[Call]]:
    with place.database.reading() as session:
        rows = ScoringService(session, place.artifacts, tenant).read(request, place.settings.scorer_request_tokens)
        session.expunge_all()
    for met in {id(row.met): row.met for row in rows}.values():
        _put_there(place, met)
    return rows, calls_of(rows)


def _put_there(place: Place, met: Met) -> None:
    """The scorer reads files from the store: one that is kept as a trajectory is made again before."""
    if met.version is not None:
        b_file(place.database, place.artifacts, met.version)


async def _ask(place: Place, tenant: str, call: Call, scores: list[list[float]]) -> None:
    """Puts what the scorer answers to its place in `scores`, by row and answer."""
    found = await place.scorer.score(tenant, call.base, call.adapters, call.texts)
    for (row, answers), text in zip(call.where, found, strict=True):
        for answer, value in zip(answers, text, strict=True):
            scores[row][answer] = value


class Growth:
    """One text on its way."""

    def __init__(self, place: Place, tenant: str, request: GenerateRequest) -> None:
        self._place, self._tenant, self._request = place, tenant, request

    async def pieces(self) -> AsyncGenerator[str | GenerateResult, None]:
        """The text as it comes, then all of it. Raises what is wrong with the request, or with the scorer.

        Whoever has enough closes the iterator.
        """
        met, adapters, asked, tokenizer = await run_in_threadpool(self._read)
        text = StoppingText(tokenizer, asked.tokens, self._request.stop)
        finish = "stop"
        async with aclosing(self._place.scorer.generate(self._tenant, met.base_ref, adapters, asked)) as tokens:
            async for token in tokens:
                if isinstance(token, str):
                    finish = token
                elif piece := text.push(token):
                    yield piece
                if text.stopped:
                    break
        if piece := text.finish():
            yield piece
        told = {"text": text.text, "tokens": text.tokens, "finish": "stop" if text.stopped else finish}
        yield GenerateResult.model_validate(met.told | told)

    def _read(self) -> tuple[Met, list[ServedAdapterRef], TextToGrow, Tokenizer]:
        with self._place.database.reading() as session:
            service = ScoringService(session, self._place.artifacts, self._tenant)
            met = service.meet(self._request, self._request.adapter)
            tokenizer = service.tokenizer(met)
            session.expunge_all()
        _put_there(self._place, met)
        return met, refs_of(met), text_to_grow(self._request, met, tokenizer), tokenizer
