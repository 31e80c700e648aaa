"""JSON models of the requests of OpenAI's API that server and device answer.

Field names and meanings are those of OpenAI's API reference ("Models", "Chat Completions", "Completions"). A field of a
request that is null, an empty list or an empty object is absent. A field that would change the text and that is not
supported is refused; fields such as `user`, `metadata` and `service_tier` are accepted and not used.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, model_validator
from pydantic_core import from_json

from shared.recipe import MAX_SEED
from shared.scoring import MAX_NEW_TOKENS, MAX_TEXT
from shared.strict_model import StrictModel

MAX_MESSAGES = 2_048
MAX_PARTS = 256  # of one message
MAX_PROMPTS = 16
MAX_CHOICES = 16  # texts that one request generates
MAX_LIKELIEST = 20
COMPLETION_TOKENS = 16  # of a completion whose request does not say; of OpenAI's API
MAX_STOPS = 8
Stop = Annotated[str, Field(min_length=1, max_length=100)]
MAX_TOOLS = 128
MAX_KEYWORDS = 100  # at the top of a JSON schema
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Stops = Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, strict=True)], ...], Field(min_length=1, max_length=MAX_TEXT)]
_SOME = Field(min_length=1, max_length=MAX_PROMPTS)
Prompts = Annotated[tuple[Text, ...], _SOME] | Annotated[tuple[TokenIds, ...], _SOME]


class _RequestModel(StrictModel):
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
    temperature: FiniteFloat | None = Field(1, ge=0, le=2)
    top_p: FiniteFloat | None = Field(1, gt=0, le=1)
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


Content = Annotated[str, Field(max_length=MAX_TEXT)] | Annotated[tuple[TextPart, ...], Field(max_length=MAX_PARTS)]


class FunctionCall(_RequestModel):
    """The function that a turn of the assistant calls. arguments: a JSON object."""

    name: ToolName
    arguments: str = Field(max_length=MAX_TEXT)

    @property
    def values(self) -> dict[str, Any]:
        """The arguments. Raises ValueError unless they are a JSON object."""
        values = from_json(self.arguments, allow_inf_nan=False)  # refuses what is too deep, as json does not
        if not isinstance(values, dict):
            raise ValueError("arguments: a JSON object")
        return values


class ToolCall(_RequestModel):
    """A call in a turn of the assistant; a turn of role `tool` answers it by its id."""

    id: str = Field(min_length=1, max_length=100)
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(_RequestModel):
    """A function that the assistant may call. parameters: the JSON schema of its arguments."""

    name: ToolName
    description: str | None = Field(None, max_length=10_000)
    parameters: dict[str, Any] | None = Field(None, max_length=MAX_KEYWORDS)
    strict: bool | None = Field(None, description="not used: the arguments of required calls satisfy the schema")


class Tool(_RequestModel):
    """A tool that the assistant may use."""

    type: Literal["function"]
    function: Function


class Message(_RequestModel):
    """A turn of a conversation. Which roles may follow each other is for the base's chat template to say.

    The message of an answer can be sent back as it came.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(None, description="null: only in a turn of the assistant that calls tools")
    tool_calls: Annotated[tuple[ToolCall, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = Field(None, max_length=100, description="with role `tool`, and only with it")
    name: str | None = Field(None, max_length=100, description="not used")
    provider_specific_fields: dict[str, Any] | None = Field(None, max_length=16, description="LiteLLM's; not used")

    @model_validator(mode="after")
    def _check_calls(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only in a turn of the assistant")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: with role tool, and only with it")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: Field required")
        _ = self.turn
        return self

    @property
    def turn(self) -> dict[str, Any]:
        """The message as a chat template takes it: one text; `developer` is the newer name of `system`."""
        parts = () if self.content is None else self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        turn: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            turn["tool_calls"] = [
                call.model_dump() | {"function": {"name": call.function.name, "arguments": call.function.values}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            turn["tool_call_id"] = self.tool_call_id
        return turn


class JsonSchema(_RequestModel):
    """A JSON schema that an answer satisfies; without one, an answer is any object."""

    name: str = Field(min_length=1, max_length=64, description="not used")
    description: str | None = Field(None, max_length=10_000, description="not used")
    content: dict[str, Any] = Field(
        {}, alias="schema", max_length=MAX_KEYWORDS, description="Draft 2020-12, of the features that compile"
    )
    strict: bool | None = Field(None, description="not used: answers always satisfy the schema")


class ResponseFormat(_RequestModel):
    """The form of an answer: any text, a JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = Field(None, description="with type `json_schema`, and only with it")

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("json_schema: with type json_schema, and only with it")
        return self

    @property
    def schema_text(self) -> str | None:
        """The schema of the answer as JSON; None: any text."""
        if self.type == "text":
            return None
        schema = {} if self.json_schema is None else dict(self.json_schema.content)
        schema.pop("x-guidance", None)  # options of the compiler
        return json.dumps(schema or {"type": "object"})


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
    tools: Annotated[tuple[Tool, ...], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Tool | None = Field(None, description="default: auto")

    @model_validator(mode="after")
    def _check_options(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.tool_choice not in (None, "none", "auto") and not self.required_tools:
            raise ValueError("tool_choice: names no function of tools")
        if self.offered_tools and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("response_format: not together with tools")
        return self

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        return () if self.tool_choice == "none" else self.tools or ()

    @property
    def tool_descriptions(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.offered_tools] or None

    @property
    def required_tools(self) -> tuple[Tool, ...]:
        """The tools of which the answer has to call one; empty: it need not."""
        if isinstance(self.tool_choice, Tool):
            name = self.tool_choice.function.name
            return tuple(tool for tool in self.tools or () if tool.function.name == name)
        return self.offered_tools if self.tool_choice == "required" else ()

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
