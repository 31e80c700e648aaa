"""OpenAI's routes: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, for OpenAI's own clients and others'.

A model is a registered base or an adapter of the caller's tenant, `NAME` or `NAME@REVISION`. Texts of all requests and
adapters are generated in one batch for each base, as by `POST /v1/generate`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from server.catalog.bases import BaseModelEntry, BaseService
from server.catalog.chat_templates import InvalidConversation, NoChatTemplate
from server.database.paging import PageRequest
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.inference.endpoints import EVENTS, REFUSALS, STREAMED, UNBUFFERED, while_there
from server.inference.openai.choices import Choices, Ended, Step
from server.inference.openai.models import (
    COMPLETION_TOKENS,
    Answer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Delta,
    Model,
    ModelList,
)
from server.inference.openai.routes import OpenAIRoutes, error_object
from server.inference.responses import TextGeneration
from server.inference.service import ModelName, ScoringService, TextRequest
from server.registry.repository import AdapterRepository
from server.web.openapi import raises
from server.web.state import AppState, State
from shared.access import Scope
from shared.errors import AdapterNotFound, MobizoError, RevisionNotFound, VersionHeld
from shared.recipe import MAX_SEED
from shared.scoring import MOST_NEW_TOKENS

router = OpenAIRoutes(prefix="/v1", tags=["openai"])
Asker = Annotated[Principal, needs(Scope.ADAPTERS_SCORE)]
MOST_LISTED = 1_000
DONE = b"data: [DONE]\n\n"


@router.get("/models")
def models(principal: Asker, state: State) -> ModelList:
    """The models that completions and chats may name."""
    with state.database.reading() as session:
        adapters = AdapterRepository(session).page(principal.tenant, PageRequest(before=None, limit=MOST_LISTED)).rows
        latest = AdapterRepository(session).latest(adapters)
        listed = [
            Model(
                id=adapter.name,
                created=_seconds(adapter.created_at),
                owned_by=principal.tenant,
                parent=latest[adapter.number].recipe.base.name,
            )
            for adapter in adapters
            if adapter.main_version is not None and adapter.number in latest
        ]
        return ModelList(data=(*listed, *(_base(base) for base in BaseService(session, state.artifacts).all())))


@router.get("/models/{model:path}", responses=raises(AdapterNotFound, RevisionNotFound, VersionHeld))
def model(principal: Asker, model: str, state: State) -> Model:
    """One model, by the name that requests give it."""
    with state.database.reading() as session:
        target = ScoringService(session, state.artifacts, principal.tenant).resolve_model(ModelName(model))
        if target.version is None:
            return _base(target.base)
        return Model(
            id=model,
            created=_seconds(target.version.created_at),
            owned_by=principal.tenant,
            parent=target.base.name,
        )


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses=STREAMED | raises(*REFUSALS, NoChatTemplate, InvalidConversation),
)
async def chat(principal: Asker, request: ChatRequest, asker: Request, state: State) -> Any:
    """The assistant's next turn, by the base model's own chat template."""
    turns = [message.turn for message in request.messages]

    def prompt(base: BaseModelEntry) -> str:
        if base.chat_template is None:
            raise NoChatTemplate(f"base model {base.name!r} has no chat template; use /v1/completions")
        return base.chat_template.render(turns)

    most = request.max_completion_tokens or request.max_tokens or MOST_NEW_TOKENS
    texts = [_text(request, number, prompt, most, special=False) for number in range(request.n or 1)]
    choices = Choices([TextGeneration(state, principal.tenant, text) for text in texts])
    about = _about("chatcmpl", request.model)
    if not request.stream:
        ended = await while_there(asker, choices.whole())
        answers = (
            ChatChoice(
                index=each.index,
                message=Answer(content=each.text),
                logprobs=each.chat_logprobs if request.logprobs else None,
                finish_reason=each.finish,
            )
            for each in ended
        )
        return ChatCompletion(
            **about, system_fingerprint=choices.fingerprint, choices=tuple(answers), usage=choices.usage
        )

    def chunk(step: Step) -> ChatChunk:
        last = isinstance(step, Ended)
        delta = Delta() if last else Delta(content=step.text, role="assistant" if step.first else None)
        logprobs = step.chat_logprobs if request.logprobs and not last else None
        finish = step.finish if isinstance(step, Ended) else None
        choice = ChatChunkChoice(index=step.index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(**about, system_fingerprint=choices.fingerprint, choices=(choice,))

    def usage() -> ChatChunk:
        return ChatChunk(**about, system_fingerprint=choices.fingerprint, choices=(), usage=choices.usage)

    return await _stream(state, choices, chunk, usage if _wants_usage(request) else None)


@router.post("/completions", response_model=Completion, responses=STREAMED | raises(*REFUSALS))
async def completions(principal: Asker, request: CompletionRequest, asker: Request, state: State) -> Any:
    """Continues each prompt."""
    most = request.max_tokens or COMPLETION_TOKENS
    prompts = [partial(_given, text) for text in request.prompts]
    texts = [
        _text(request, number, prompt, most)
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n or 1))
    ]
    choices = Choices([TextGeneration(state, principal.tenant, text) for text in texts])
    about = _about("cmpl", request.model)

    def choice(step: Step) -> CompletionChoice:
        sent = isinstance(step, Ended) and request.stream  # with the chunks before
        return CompletionChoice(
            index=step.index,
            text="" if sent else step.text,
            logprobs=None if request.logprobs is None or sent else step.completion_logprobs,
            finish_reason=step.finish if isinstance(step, Ended) else None,
        )

    if not request.stream:
        ended = await while_there(asker, choices.whole())
        return Completion(
            **about, system_fingerprint=choices.fingerprint, choices=tuple(map(choice, ended)), usage=choices.usage
        )

    def chunk(step: Step) -> Completion:
        return Completion(**about, system_fingerprint=choices.fingerprint, choices=(choice(step),))

    def usage() -> Completion:
        return Completion(**about, system_fingerprint=choices.fingerprint, choices=(), usage=choices.usage)

    return await _stream(state, choices, chunk, usage if _wants_usage(request) else None)


def _text(
    request: ChatRequest | CompletionRequest, number: int, prompt: Any, most: int, *, special: bool = True
) -> TextRequest:
    """Returns the request of one text. Each text of a request has a seed of its own."""
    seed = secrets.randbelow(MAX_SEED) if request.seed is None else (request.seed + number) % (MAX_SEED + 1)
    return TextRequest(
        prompt=prompt,
        model=ModelName(request.model),
        max_tokens=most,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=seed,
        stop=request.stops,
        special=special,
        likeliest=request.likeliest if isinstance(request, ChatRequest) else request.logprobs,
    )


def _given(prompt: str, _base: BaseModelEntry) -> str:
    """Returns a prompt that is the same for every base model."""
    return prompt


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def _about(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": _seconds(datetime.now(UTC)), "model": model}


def _seconds(moment: datetime) -> int:
    return int(moment.replace(tzinfo=UTC).timestamp())


def _base(base: BaseModelEntry) -> Model:
    return Model(id=base.name, created=_seconds(base.created_at), owned_by="base")


async def _stream(state: AppState, choices: Choices, chunk: Any, usage: Any) -> StreamingResponse:
    """Returns the response of a stream. What is refused before the first token is answered as by any route."""
    steps = choices.steps()
    first = await anext(steps)

    async def events() -> AsyncIterator[bytes]:
        with state.meters.streams.track_inprogress():
            async with aclosing(steps):
                yield _event(chunk(first))
                try:
                    async for step in steps:
                        yield _event(chunk(step))
                except MobizoError as error:
                    yield f"data: {json.dumps(error_object(error))}\n\n".encode()
                else:
                    if usage is not None:
                        yield _event(usage())
                yield DONE

    return StreamingResponse(events(), media_type=EVENTS, headers=UNBUFFERED)


def _event(chunk: ChatChunk | Completion) -> bytes:
    body = chunk.model_dump(mode="json")
    if body["usage"] is None:
        del body["usage"]
    for choice in body["choices"]:
        if "delta" in choice:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
    return f"data: {json.dumps(body)}\n\n".encode()
