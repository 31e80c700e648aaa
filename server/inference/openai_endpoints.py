"""OpenAI's routes: `/v1/models`, `/v1/completions` and `/v1/chat/completions`, for OpenAI's own clients and others'.

A model is a registered base or an adapter of the caller's tenant, `NAME` or `NAME@REVISION`.
"""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request, Response

from server.catalog.bases import BaseModelEntry, BaseRepository
from server.database.paging import PageRequest
from server.inference.endpoints import REFUSALS, ScoringPrincipal
from server.inference.responses import Generation
from server.inference.service import ScoringService
from server.registry.repository import AdapterRepository
from server.web.openapi import PROBLEM_JSON, raises
from server.web.routes import Route, Routes
from server.web.state import State
from server.web.streams import STREAMED, cancelled_on_disconnect, event_stream
from shared.chat_template import InvalidConversation, NoChatTemplate
from shared.constrained_decoding import InvalidSchema, NoTokenAllowed
from shared.errors import AdapterNotFound, MobizoError, RevisionNotFound, VersionHeld
from shared.openai.answers import ChatWriter, CompletionWriter, error_object, unix_seconds
from shared.openai.completions import ChatCompletion, Model, ModelList, TextCompletion
from shared.openai.requests import ChatRequest, CompletionRequest
from shared.openai.tools import ToolsNotSupported

JSON = "application/json"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}


class OpenAIRoute(Route):
    """A route of OpenAI's API."""

    def __init__(self, path: str, endpoint: Any, **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        for response in self.responses.values():
            if PROBLEM_JSON in response.get("content", {}):
                # What is refused before any route, such as an address with control characters, is a problem document.
                response["content"][JSON] = {"schema": ERROR_SCHEMA}

    def refused(self, request: Request, error: MobizoError) -> Response:
        """Returns an error in OpenAI's form, which its clients turn into their exceptions."""
        headers = dict(super().refused(request, error).headers)
        del headers["content-length"], headers["content-type"]
        return Response(json.dumps(error_object(error)), error.status, headers, JSON)


router = Routes(OpenAIRoute, prefix="/v1", tags=["openai"])
MAX_LISTED = 1_000


@router.get("/models")
def list_models(principal: ScoringPrincipal, state: State) -> ModelList:
    """The models that completions and chats may name."""
    with state.database.reading() as session:
        adapters = AdapterRepository(session).page(principal.tenant, PageRequest(before=None, limit=MAX_LISTED)).rows
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
        return ModelList(data=(*adapter_models, *map(_base_model, BaseRepository(session).all())))


@router.get("/models/{model:path}", responses=raises(AdapterNotFound, RevisionNotFound, VersionHeld))
def get_model(principal: ScoringPrincipal, model: str, state: State) -> Model:
    """One model, by the name that requests give it."""
    with state.database.reading() as session:
        target = ScoringService(session, state.artifacts, principal.tenant).resolve_model(model)
        if target.version is None:
            return _base_model(target.base)
        created = unix_seconds(target.version.created_at)
        return Model(id=model, created=created, owned_by=principal.tenant, parent=target.base.name)


def _base_model(base: BaseModelEntry) -> Model:
    return Model(id=base.name, created=unix_seconds(base.created_at), owned_by="base")


@router.post(
    "/chat/completions",
    response_model=ChatCompletion,
    responses=STREAMED
    | raises(*REFUSALS, NoChatTemplate, InvalidConversation, InvalidSchema, NoTokenAllowed, ToolsNotSupported),
)
async def create_chat_completion(
    principal: ScoringPrincipal, request: ChatRequest, connection: Request, state: State
) -> Any:
    """The assistant's next turn, by the base model's own chat template."""
    generation = Generation(state, principal.tenant, request)
    writer = ChatWriter(request, generation)
    if request.stream:
        return await event_stream(state, await generation.events(writer))
    return writer.response(await cancelled_on_disconnect(connection, generation.whole()))


@router.post("/completions", response_model=TextCompletion, responses=STREAMED | raises(*REFUSALS))
async def create_completion(
    principal: ScoringPrincipal, request: CompletionRequest, connection: Request, state: State
) -> Any:
    """Continues each prompt."""
    generation = Generation(state, principal.tenant, request)
    writer = CompletionWriter(request, generation)
    if request.stream:
        return await event_stream(state, await generation.events(writer))
    return writer.response(await cancelled_on_disconnect(connection, generation.whole()))
