"""OpenAI's routes: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, for OpenAI's own clients and others'.

A model is a registered base or an adapter of the caller's tenant, `NAME` or `NAME@REVISION`. Texts of all requests and
adapters are generated in one batch for each base, as by `POST /v1/generate`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import StreamingResponse

from server.catalog.bases import BaseModelEntry, BaseService
from server.database.paging import PageRequest
from server.identity.access_rules import needs
from server.identity.tokens import Principal
from server.inference.endpoints import EVENTS, REFUSALS, STREAMED, UNBUFFERED, cancelled_on_disconnect
from server.inference.openai.choices import Choices
from server.inference.openai.error_format import OpenAIRoutes
from server.inference.responses import TextGeneration
from server.inference.service import ModelName, ScoringService, TextRequest
from server.registry.repository import AdapterRepository
from server.web.openapi import raises
from server.web.state import AppState, State
from shared.access import Scope
from shared.chat_template import InvalidConversation, NoChatTemplate
from shared.errors import AdapterNotFound, RevisionNotFound, VersionHeld
from shared.openai.answers import (
    ChatWriter,
    CompletionWriter,
    TextOptions,
    Writer,
    events,
    unix_seconds,
)
from shared.openai.models import ChatCompletion, ChatRequest, Completion, CompletionRequest, Model, ModelList

router = OpenAIRoutes(prefix="/v1", tags=["openai"])
Asker = Annotated[Principal, needs(Scope.ADAPTERS_SCORE)]
MOST_LISTED = 1_000


@router.get("/models")
def models(principal: Asker, state: State) -> ModelList:
    """The models that completions and chats may name."""
    with state.database.reading() as session:
        adapters = AdapterRepository(session).page(principal.tenant, PageRequest(before=None, limit=MOST_LISTED)).rows
        latest = AdapterRepository(session).latest(adapters)
        adapter_models = [
            Model(
                id=adapter.name,
                created=unix_seconds(adapter.created_at),
                owned_by=principal.tenant,
                parent=latest[adapter.number].recipe.base.name,
            )
            for adapter in adapters
            if adapter.main_version is not None and adapter.number in latest
        ]
        return ModelList(data=(*adapter_models, *(_base(base) for base in BaseService(session, state.artifacts).all())))


@router.get("/models/{model:path}", responses=raises(AdapterNotFound, RevisionNotFound, VersionHeld))
def model(principal: Asker, model: str, state: State) -> Model:
    """One model, by the name that requests give it."""
    with state.database.reading() as session:
        target = ScoringService(session, state.artifacts, principal.tenant).resolve_model(ModelName(model))
        if target.version is None:
            return _base(target.base)
        return Model(
            id=model,
            created=unix_seconds(target.version.created_at),
            owned_by=principal.tenant,
            parent=target.base.name,
        )


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses=STREAMED | raises(*REFUSALS, NoChatTemplate, InvalidConversation),
)
async def chat(principal: Asker, request: ChatRequest, connection: Request, state: State) -> Any:
    """The assistant's next turn, by the base model's own chat template."""
    turns = [message.turn for message in request.messages]

    def prompt(base: BaseModelEntry) -> str:
        if base.chat_template is None:
            raise NoChatTemplate(f"base model {base.name!r} has no chat template; use /v1/completions")
        return base.chat_template.render(turns)

    texts = [_text(request, number, prompt, special=False) for number in range(request.n or 1)]
    choices = Choices([TextGeneration(state, principal.tenant, text) for text in texts])
    return await _answer(state, connection, choices, ChatWriter(request, choices), request.stream)


@router.post("/completions", response_model=Completion, responses=STREAMED | raises(*REFUSALS))
async def completions(principal: Asker, request: CompletionRequest, connection: Request, state: State) -> Any:
    """Continues each prompt."""
    prompts = [partial(_plain_prompt, text) for text in request.prompts]
    texts = [
        _text(request, number, prompt)
        for number, prompt in enumerate(prompt for prompt in prompts for _ in range(request.n or 1))
    ]
    choices = Choices([TextGeneration(state, principal.tenant, text) for text in texts])
    return await _answer(state, connection, choices, CompletionWriter(request, choices), request.stream)


def _text(request: ChatRequest | CompletionRequest, number: int, prompt: Any, *, special: bool = True) -> TextRequest:
    options = TextOptions.of(request, number)
    return TextRequest(prompt=prompt, model=ModelName(request.model), special=special, **vars(options))


def _plain_prompt(prompt: str, _base: BaseModelEntry) -> str:
    """Returns a prompt that is the same for every base model."""
    return prompt


def _base(base: BaseModelEntry) -> Model:
    return Model(id=base.name, created=unix_seconds(base.created_at), owned_by="base")


async def _answer(state: AppState, connection: Request, choices: Choices, writer: Writer, stream: bool | None) -> Any:
    """Returns the texts, whole or as a stream."""
    if not stream:
        return writer.response(await cancelled_on_disconnect(connection, choices.whole()))
    return await _stream(state, choices, writer)


async def _stream(state: AppState, choices: Choices, writer: Writer) -> StreamingResponse:
    """Returns the response of a stream. What is refused before the first token is answered as by any route."""
    steps = choices.steps()
    first = await anext(steps)

    async def tracked_events() -> AsyncIterator[bytes]:
        with state.meters.streams.track_inprogress():
            async for part in events(first, steps, writer):
                yield part

    return StreamingResponse(tracked_events(), media_type=EVENTS, headers=UNBUFFERED)
