"""JSON models of the answers of OpenAI's API: models, usage, and completions whole and in pieces."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shared.openai.requests import ToolCall
from shared.strict_model import StrictModel


class Model(StrictModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="seconds since 1970")
    owned_by: str = Field(description="`base` for a base model, otherwise the tenant")
    parent: str | None = Field(None, description="the base model of an adapter")


class ModelList(StrictModel):
    """The newest 1,000 adapters that have an approved version, then the base models."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class Usage(StrictModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LikelyToken(StrictModel):
    """A token and its log-probability, nats. bytes: of its text in UTF-8."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatLogprob(LikelyToken):
    """A generated token, and the likeliest tokens in its place."""

    top_logprobs: tuple[LikelyToken, ...]


class ChatLogprobs(StrictModel):
    """The generated tokens of a message. A text that ended at a stop text lacks those of the stop text."""

    content: tuple[ChatLogprob, ...]
    refusal: None = None


class CompletionLogprobs(StrictModel):
    """The generated tokens of a completion."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


Finish = Literal["stop", "length", "tool_calls"]


class AssistantMessage(StrictModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    tool_calls: tuple[ToolCall, ...] | None = None
    refusal: None = None


class ChatChoice(StrictModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(StrictModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = Field(None, description="revision of the adapter's version, or none")
    choices: tuple[ChatChoice, ...]
    usage: Usage


class DeltaToolCall(ToolCall):
    """A call that a chunk adds to a message."""

    index: int


class Delta(StrictModel):
    """The text or the calls that a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: tuple[DeltaToolCall, ...] | None = None


class ChatChunkChoice(StrictModel):
    """A chunk of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(StrictModel):
    """An event of a stream of chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None


class CompletionChoice(StrictModel):
    """One completion, or a chunk of it, which has no reason to finish before the last one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None


class TextCompletion(StrictModel):
    """Completions, or an event of a stream of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
