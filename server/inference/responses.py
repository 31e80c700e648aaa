"""Answers requests to score and to generate by the scorer. No transaction and no thread is held while it works."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from itertools import islice

import anyio.to_thread
from anyio import CapacityLimiter
from fastapi.concurrency import run_in_threadpool
from tokenizers import Tokenizer

from server.inference.scorer import make_scorer
from server.inference.service import ReadRow, ResolvedTarget, ScoringService, texts_to_score
from server.inference.texts import Text
from server.registry.repository import read_version
from server.registry.trajectories.reconstruction import b_file
from server.web.state import AppState
from shared.chat_template import NoChatTemplate
from shared.constrained_decoding import check_schema
from shared.openai.answers import FinishedText, GrowingText, ResponsePiece, TextOptions, Writer, events
from shared.openai.completions import Usage
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.openai.tools import ToolUse
from shared.recipe import MAX_SEED
from shared.registry import MAIN
from shared.scoring import ClassifyRequest, ClassifyResult, RowScore, ScoreRequest, ScoreResult, ScoreRow
from shared.zo.encoding import prompt_tokens

Prompt = str | tuple[int, ...]
READERS = 2  # requests whose texts are tokenized at the same time


def _make_readers(state: AppState) -> CapacityLimiter:
    return CapacityLimiter(READERS)


async def score(state: AppState, tenant: str, request: ScoreRequest, allow_held: bool = False) -> ScoreResult:
    """Scores every row of a request. Raises the errors of the request or of the scorer.

    allow_held: as for ScoringService.

    Stops when it is cancelled, also while the texts are tokenized.
    """
    disconnected = threading.Event()
    try:
        read = partial(_read_rows, state, tenant, request, allow_held, disconnected.is_set)
        rows = await anyio.to_thread.run_sync(read, limiter=state.get(_make_readers), abandon_on_cancel=True)
    finally:
        disconnected.set()
    results: dict[int, RowScore] = {}
    for base in dict.fromkeys(row.target.base_ref for row in rows):
        of_base = {at: row for at, row in enumerate(rows) if row.target.base_ref == base}
        texts = [text for row in of_base.values() for text in texts_to_score(row)]
        async with aclosing(state.get(make_scorer).ask(tenant, base, texts)) as answers:
            picked = {index: log_probabilities async for index, log_probabilities, _ in answers}
        in_order = (picked[index] for index in range(len(texts)))
        for at, row in of_base.items():
            results[at] = row.result(list(islice(in_order, len(row.plan.readings))))
    return ScoreResult(rows=tuple(results[at] for at in range(len(rows))))


def _read_rows(
    state: AppState, tenant: str, request: ScoreRequest, allow_held: bool, cancelled: Callable[[], bool]
) -> list[ReadRow]:
    with state.database.reading() as session:
        rows = ScoringService(session, state.artifacts, tenant, allow_held).read(request, cancelled)
    for target in {id(row.target): row.target for row in rows}.values():
        _store_adapter(state, target)
    return rows


def _store_adapter(state: AppState, target: ResolvedTarget) -> None:
    """Makes sure that the adapter file is stored, since the scorer reads it from there."""
    if target.version is not None:
        b_file(state.database, state.artifacts, target.version)


class Generation:
    """The texts of one request while they are generated. usage, fingerprint and target are there with the first piece.

    usage counts a prompt once, however many texts follow it.
    """

    target: ResolvedTarget

    def __init__(
        self, state: AppState, tenant: str, request: ChatRequest | CompletionRequest, allow_held: bool = False
    ) -> None:
        """allow_held: as for ScoringService."""
        self._state, self._tenant, self._request, self._allow_held = state, tenant, request, allow_held
        self._options = TextOptions.of(request, 0)
        self._scorer, self._readers = state.get(make_scorer), state.get(_make_readers)
        self._prompt_tokens = 0
        self._texts: list[GrowingText] = []
        self.fingerprint: str | None = None
        self.tools: ToolUse | None = None

    @property
    def usage(self) -> Usage:
        """The tokens so far."""
        read, generated = self._prompt_tokens, sum(text.tokens for text in self._texts)
        return Usage(prompt_tokens=read, completion_tokens=generated, total_tokens=read + generated)

    async def whole(self) -> list[FinishedText]:
        """Returns the texts in the request's order. Raises the errors of the request or of the scorer."""
        async with aclosing(self.pieces()) as pieces:
            ended = [piece async for piece in pieces if isinstance(piece, FinishedText)]
        return sorted(ended, key=lambda each: each.index)

    async def pieces(self) -> AsyncGenerator[ResponsePiece, None]:
        """Yields the pieces of all texts as they come, and each text's end. Close the iterator to cancel all."""
        self.target, tokenizer = await anyio.to_thread.run_sync(self._resolve, limiter=self._readers)
        self.fingerprint = None if self.target.version is None else self.target.version.revision
        prompts = await self._prompts()
        texts = await anyio.to_thread.run_sync(self._read, tokenizer, prompts, limiter=self._readers)
        self._texts = [GrowingText(index, tokenizer, text.tokens, self._options) for index, text in enumerate(texts)]
        async with aclosing(self._scorer.ask(self._tenant, self.target.base_ref, texts)) as answers:
            async for index, token, finish in answers:
                text = self._texts[index]
                if text.ended:
                    continue  # by a stop text
                if token is not None:
                    for piece in text.push(token):
                        yield piece
                if finish is not None:
                    for piece in text.end(finish):
                        yield piece
                if all(each.ended for each in self._texts):
                    return

    async def events(self, writer: Writer) -> AsyncGenerator[bytes, None]:
        """Returns the server-sent events of the texts once there is a first piece. Raises as `whole` before it."""
        pieces = self.pieces()
        return events(await anext(pieces), pieces, writer)

    def _resolve(self) -> tuple[ResolvedTarget, Tokenizer]:
        with self._state.database.reading() as session:
            service = ScoringService(session, self._state.artifacts, self._tenant, self._allow_held)
            target = service.resolve_model(self._request.model)
            tokenizer = service.tokenizer(target)
        _store_adapter(self._state, target)
        return target, tokenizer

    async def _prompts(self) -> tuple[Prompt, ...]:
        """Returns the prompts. A conversation becomes one by the base model's own chat template."""
        if isinstance(self._request, CompletionRequest):
            return self._request.prompts
        base = self.target.base
        if base.chat_template is None:
            raise NoChatTemplate(f"base model {base.name!r} has no chat template; use /v1/completions")
        self.tools = ToolUse.of(self._request, base.chat_template)
        turns = [message.turn for message in self._request.messages]
        prompt = await self._scorer.render(base.chat_template, turns, self._request.tool_descriptions)
        return (prompt + (self.tools.prompt_end if self.tools else ""),)

    def _read(self, tokenizer: Tokenizer, prompts: tuple[Prompt, ...]) -> list[Text]:
        """Returns the prompts as tokens. Raises TextTooLong, UnknownToken, InvalidSchema.

        Any special token ends a text, and the tokens that the base's files name, whether special or not.
        """
        target, options, texts = self.target, self._options, list[Text]()
        schema = self.tools.schema if self.tools else options.schema
        if schema is not None:
            check_schema(schema, "tools" if self.tools else "response_format")
        added = tokenizer.get_added_tokens_decoder().items()
        special = (token for token, how in added if how.special and not (self.tools and self.tools.opens(how.content)))
        ends = (*(target.base.end_tokens or ()), *special)
        shape = target.base.shape
        context = shape.context_length
        for prompt in prompts:
            # A template writes special tokens such as BOS itself.
            special_tokens = isinstance(self._request, CompletionRequest)
            tokens = prompt_tokens(tokenizer, prompt, context, shape.vocabulary, special=special_tokens)
            self._prompt_tokens += len(tokens)
            for _ in range(self._request.n or 1):
                text = Text(
                    tokens,
                    target.adapter_ref,
                    # The last token is never read.
                    max_tokens=min(options.max_tokens, context - len(tokens) + 1),
                    temperature=options.temperature,
                    top_p=options.top_p,
                    seed=(options.seed + len(texts)) % (MAX_SEED + 1),
                    ends=ends,
                    likeliest=options.likeliest,
                    schema=schema,
                )
                texts.append(text)
        return texts


async def classify(state: AppState, tenant: str, adapter: str, request: ClassifyRequest) -> ClassifyResult:
    """Scores the labels for a record, as `POST /v1/score` does. adapter: NAME or NAME@REVISION.

    Raises the errors of `ClassifyRequest.record` and `score`.
    """
    name, _, revision = adapter.partition("@")
    version = await run_in_threadpool(read_version, state.database, tenant, name, revision or MAIN)
    task = version.manifest.task
    row = ScoreRow(adapter=f"{name}@{version.revision}", record=request.record(task))
    (result,) = (await score(state, tenant, ScoreRequest(task=task, rows=(row,)))).rows
    scores = [(answer.label or answer.text, answer.probability, answer.log_probability) for answer in result.answers]
    return ClassifyResult.of(result, scores)
