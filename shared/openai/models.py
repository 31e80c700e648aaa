"""JSON models of OpenAI's API, of the part that server and device speak.

Field names and meanings are those of OpenAI's API reference ("Models", "Chat Completions", "Completions"). A field of a
request that is null, an empty list or an empty object is absent. A field that would change the text and that is not
supported is refused; fields such as `user`, `metadata` and `service_tier` are accepted and not used.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from shared.recipe import MAX_SEED
from shared.scoring import MAX_NEW_TOKENS, MAX_TEXT

MAX_MESSAGES = 2_048
MAX_PARTS = 256  # of one message
MAX_PROMPTS = 16
MAX_CHOICES = 16  # texts that one request generates
MAX_LIKELIEST = 20
COMPLETION_TOKENS = 16  # of a completion whose request does not say; of OpenAI's API
MAX_STOPS = 8
Stop = Annotated[str, Field(min_length=1, max_length=100)]
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1, max_length=MAX_TEXT)]
_SOME = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = Annotated[tuple[Text, ...], _SOME] | Annotated[tuple[TokenIds, ...], _SOME]


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _RequestModel(_WireModel):
    @model_validator(mode="before")
    @classmethod
    def _drop_absent(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None and value not in ([], {})}


class StreamOptions(_RequestModel):
    """Options of a stream. include_usage: its last chunk has the request's usage."""

    include_usage: bool = False
    include_obfuscation: bool | None = Field(None, description="not used")


class _TextOptions(_RequestModel):
    """The fields that chats and completions share."""

    model: str = Field(
        min_length=1, max_length=200, description="an adapter, `NAME` or `NAME@REVISION`, or else a base model"
    )
    max_tokens: int | None = Field(None, ge=1, description=f"at most {MAX_NEW_TOKENS} are written")
    temperature: float | None = Field(1, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(1, gt=0, le=1, allow_inf_nan=False)
    n: int | None = Field(1, ge=1, le=MAX_CHOICES, description="texts for each prompt")
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED, description="null: another one for each request")
    stop: Stop | Stops | None = Field(None, description="texts before which the answer ends")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    frequency_penalty: Literal[0] | None = Field(None, description="only 0")
    presence_penalty: Literal[0] | None = Field(None, description="only 0")
    user: str | None = Field(None, max_length=1_000, description="not used")
    service_tier: str | None = Field(None, max_length=100, description="not used")
    safety_identifier: str | None = Field(None, max_length=1_000, description="not used")
    prompt_cache_key: str | None = Field(None, max_length=1_000, description="not used")

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts before which the answer ends."""
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else self.stop

    @model_validator(mode="after")
    def _check_stream(self) -> _TextOptions:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self


class TextPart(_RequestModel):
    """A part of a message. Other parts, such as images, are refused."""

    type: Literal["text"]
    text: str = Field(max_length=MAX_TEXT)


class Message(_RequestModel):
    """A turn of a conversation. Which roles may follow each other is for the base's chat template to say.

    The message of an answer can be sent back as it came.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[tuple[TextPart, ...], Field(max_length=MAX_PARTS)]
    name: str | None = Field(None, max_length=100, description="not used")
    provider_specific_fields: dict[str, Any] | None = Field(None, max_length=16, description="LiteLLM's; not used")

    @property
    def turn(self) -> dict[str, str]:
        """The message as a chat template takes it: one text; `developer` is the newer name of `system`."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ResponseFormat(_RequestModel):
    """The form of an answer: any text."""

    type: Literal["text"]


class ChatRequest(_TextOptions):
    """A conversation to continue."""

    messages: tuple[Message, ...] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, description="instead of max_tokens")
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    response_format: ResponseFormat | None = None
    metadata: dict[str, Any] | None = Field(None, max_length=16, description="not used")
    store: Literal[False] | None = Field(None, description="only false: nothing is stored")
    modalities: tuple[Literal["text"]] | None = Field(None, description="only text")
    parallel_tool_calls: bool | None = Field(None, description="not used")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="not used, because there are no tools")

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        return self

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are reported at each place; None: no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_TextOptions):
    """Prompts to continue."""

    prompt: Text | TokenIds | Prompts
    logprobs: int | None = Field(None, ge=0, le=MAX_LIKELIEST)
    echo: Literal[False] | None = Field(None, description="only false; POST /v1/score gives a prompt's probabilities")
    suffix: Literal[""] | None = None
    best_of: int | None = Field(None, ge=1, description="only as large as n")

    @property
    def prompts(self) -> tuple[str | tuple[int, ...], ...]:
        """The prompts, each as a text or as tokens."""
        if isinstance(self.prompt, str):
            return (self.prompt,)
        return (tuple(self.prompt),) if isinstance(self.prompt[0], int) else tuple(self.prompt)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if len(self.prompts) * (self.n or 1) > MAX_PROMPTS:
            raise ValueError(f"prompt: at most {MAX_PROMPTS} texts a request, counting n for each prompt")
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of: only as large as n")
        return self


class Model(_WireModel):
    """A model that requests may name."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="seconds since 1970")
    owned_by: str = Field(description="`base` for a base model, otherwise the tenant")
    parent: str | None = Field(None, description="the base model of an adapter")


class ModelList(_WireModel):
    """The newest 1,000 adapters that have an approved version, then the base models."""

    object: Literal["list"] = "list"
    data: tuple[Model, ...]


class Usage(_WireModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class LikelyToken(_WireModel):
    """A token and its log-probability, nats. bytes: of its text in UTF-8."""

    token: str
    logprob: float
    bytes: tuple[int, ...] | None


class ChatLogprob(LikelyToken):
    """A generated token, and the likeliest tokens in its place."""

    top_logprobs: tuple[LikelyToken, ...]


class ChatLogprobs(_WireModel):
    """The generated tokens of a message. A text that ended at a stop text lacks those of the stop text."""

    content: tuple[ChatLogprob, ...]
    refusal: None = None


class CompletionLogprobs(_WireModel):
    """The generated tokens of a completion."""

    tokens: tuple[str, ...]
    token_logprobs: tuple[float, ...]
    top_logprobs: tuple[dict[str, float], ...]
    text_offset: tuple[int, ...]


Finish = Literal["stop", "length"]


class AssistantMessage(_WireModel):
    """The assistant's turn."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_WireModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish


class ChatCompletion(_WireModel):
    """The answers to a conversation."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str | None = Field(None, description="revision of the adapter's version, or none")
    choices: tuple[ChatChoice, ...]
    usage: Usage


class Delta(_WireModel):
    """The text that a chunk adds to a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_WireModel):
    """A chunk of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Finish | None = None


class ChatChunk(_WireModel):
    """An event of a stream of chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None


class CompletionChoice(_WireModel):
    """One completion, or a chunk of it, which has no reason to finish before the last one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Finish | None


class TextCompletion(_WireModel):
    """Completions, or an event of a stream of them."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None
