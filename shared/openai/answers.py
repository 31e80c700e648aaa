"""Generated texts as OpenAI's API writes them: whole answers, the events of streams, and errors."""

from __future__ import annotations

import codecs
import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from tokenizers import Tokenizer

from shared.errors import AdapterNotFound, MobizoError, RevisionNotFound, TooManyRequests, Unauthorized
from shared.generated_text import GeneratedToken, StopTextFilter
from shared.openai.completions import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    DeltaToolCall,
    Finish,
    LikelyToken,
    TextCompletion,
    Usage,
)
from shared.openai.requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest, ToolCall
from shared.openai.tools import ToolUse
from shared.recipe import MAX_SEED
from shared.scoring import MAX_NEW_TOKENS
from shared.tokenizer import token_bytes

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class TextOptions:
    """How one text of a request is generated.

    likeliest: tokens reported per position; None: no log-probabilities. schema: JSON schema that it satisfies, as JSON.
    """

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    likeliest: int | None
    schema: str | None = None

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, number: int) -> TextOptions:
        """Returns the options of text `number` of a request. Each text has a seed of its own."""
        chat = isinstance(request, ChatRequest)
        max_completion_tokens = request.max_completion_tokens if isinstance(request, ChatRequest) else None
        response_format = request.response_format if isinstance(request, ChatRequest) else None
        max_tokens = max_completion_tokens or request.max_tokens or (MAX_NEW_TOKENS if chat else COMPLETION_TOKENS)
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else (request.seed + number) % (MAX_SEED + 1)
        return cls(
            max_tokens=min(max_tokens, MAX_NEW_TOKENS),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=seed,
            stop=request.stops,
            likeliest=request.likeliest if isinstance(request, ChatRequest) else request.logprobs,
            schema=None if response_format is None else response_format.schema_text,
        )


@dataclass(frozen=True)
class ResponsePiece:
    """A piece of a text. index: of the text in the request. start: characters of the text before it."""

    index: int
    text: str
    tokens: tuple[GeneratedToken, ...]
    tokenizer: Tokenizer
    start: int = 0

    @property
    def first(self) -> bool:
        """Whether the text begins with this piece."""
        return self.start == 0

    @property
    def chat_logprobs(self) -> ChatLogprobs:
        """The log-probabilities of its tokens, as chats have them."""
        return ChatLogprobs(
            content=tuple(
                ChatLogprob(
                    **self._likely_token(generated.token, generated.log_probability or 0.0).model_dump(),
                    top_logprobs=tuple(self._likely_token(token, chance) for token, chance in generated.likeliest),
                )
                for generated in self.tokens
            )
        )

    @property
    def completion_logprobs(self) -> CompletionLogprobs:
        """The log-probabilities of its tokens, as completions have them."""
        texts = [self._text_of(generated.token) for generated in self.tokens]
        offsets, offset = [], self.start
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for generated in self.tokens:
            offsets.append(offset)
            offset += len(decoder.decode(token_bytes(self.tokenizer, generated.token)))
        return CompletionLogprobs(
            tokens=tuple(texts),
            token_logprobs=tuple(generated.log_probability or 0.0 for generated in self.tokens),
            top_logprobs=tuple(
                {self._text_of(token): log_probability for token, log_probability in generated.likeliest}
                for generated in self.tokens
            ),
            text_offset=tuple(offsets),
        )

    def _likely_token(self, token: int, log_probability: float) -> LikelyToken:
        spelling = tuple(token_bytes(self.tokenizer, token))
        return LikelyToken(token=self._text_of(token), logprob=log_probability, bytes=spelling)

    def _text_of(self, token: int) -> str:
        """Returns a token's text; one that is part of a character is written as OpenAI's API does, by its bytes."""
        spelling = token_bytes(self.tokenizer, token)
        try:
            return spelling.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


@dataclass(frozen=True)
class FinishedText(ResponsePiece):
    """The last piece of a text, or the complete text, and why it ended."""

    finish: Finish = "stop"


class GrowingText:
    """One text of a request while it is generated: its tokens become pieces of the response."""

    def __init__(self, index: int, tokenizer: Tokenizer, prompt: Sequence[int], options: TextOptions) -> None:
        """index: of the text in the request. prompt: its tokens."""
        self._index, self._tokenizer = index, tokenizer
        self._filter = StopTextFilter(tokenizer, prompt, options.stop)
        self._shows_textless = options.likeliest is not None  # final tokens without text are shown, too
        self._waiting: list[GeneratedToken] = []  # tokens since the last piece
        self._shown: list[GeneratedToken] = []
        self._start = 0  # characters of the pieces so far
        self.ended = False

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._filter.tokens

    def push(self, token: GeneratedToken) -> list[ResponsePiece]:
        """Adds a token. Returns the piece that can be shown, if any, and the end if a stop text has ended the text."""
        self._waiting.append(token)
        text = self._filter.push(token.token)
        pieces = [self._piece(text)] if text else []
        return [*pieces, *self.end("stop")] if self._filter.stopped else pieces

    def end(self, finish: Finish) -> list[ResponsePiece]:
        """Ends the text. Returns the piece that was held back, if any, and the end; nothing if it has ended."""
        if self.ended:
            return []
        self.ended = True
        text = self._filter.finish()
        shows = text or (self._waiting and self._shows_textless and not self._filter.stopped)
        pieces = [self._piece(text)] if shows else []
        whole = FinishedText(self._index, self._filter.text, tuple(self._shown), self._tokenizer, finish=finish)
        return [*pieces, whole]

    def _piece(self, text: str) -> ResponsePiece:
        piece = ResponsePiece(self._index, text, tuple(self._waiting), self._tokenizer, self._start)
        self._shown += self._waiting
        self._waiting.clear()
        self._start += len(text)
        return piece


class GenerationState(Protocol):
    """The usage and fingerprint of a request's texts: available with the first piece, final at the end."""

    fingerprint: str | None
    tools: ToolUse | None

    @property
    def usage(self) -> Usage:
        """The tokens so far."""


class Writer(Protocol):
    """Writes the texts of one request."""

    @property
    def id(self) -> str:
        """The id of the answer, which each event of its stream repeats."""

    def response(self, texts: Sequence[FinishedText]) -> ChatCompletion | TextCompletion:
        """Returns the answer that has all texts, in the request's order."""

    def chunk(self, piece: ResponsePiece) -> ChatChunk | TextCompletion:
        """Returns one event of a stream."""

    def usage_event(self) -> ChatChunk | TextCompletion | None:
        """Returns the event that follows all texts, if the request asked for usage."""


class ChatWriter:
    """Writes the answers to a conversation."""

    def __init__(self, request: ChatRequest, state: GenerationState) -> None:
        self._request, self._state = request, state
        self._common_fields = _common_fields("chatcmpl", request.model)
        self.id: str = self._common_fields["id"]

    def response(self, texts: Sequence[FinishedText]) -> ChatCompletion:
        """Returns the answer that has all texts."""
        choices = []
        for text in texts:
            content, calls = self._read(text)
            choice = ChatChoice(
                index=text.index,
                message=AssistantMessage(content=content, tool_calls=calls or None),
                logprobs=text.chat_logprobs if self._request.logprobs else None,
                finish_reason="tool_calls" if calls else text.finish,
            )
            choices.append(choice)
        return ChatCompletion(
            **self._common_fields,
            system_fingerprint=self._state.fingerprint,
            choices=tuple(choices),
            usage=self._state.usage,
        )

    def _read(self, text: FinishedText) -> tuple[str | None, tuple[ToolCall, ...]]:
        """Returns the content and the tool calls of an answer."""
        return (text.text, ()) if self._state.tools is None else self._state.tools.read(text.text)

    def chunk(self, piece: ResponsePiece) -> ChatChunk:
        """Returns one event of a stream. With tools, the last one has the text or the calls."""
        finish: Finish | None = None
        if isinstance(piece, FinishedText):
            content, calls = (None, ()) if self._state.tools is None else self._read(piece)
            deltas = tuple(DeltaToolCall(index=index, **call.model_dump()) for index, call in enumerate(calls))
            delta = Delta(content=content, tool_calls=deltas or None)
            finish = "tool_calls" if calls else piece.finish
        else:
            content = None if self._state.tools else piece.text
            delta = Delta(content=content, role="assistant" if piece.first else None)
        logprobs = piece.chat_logprobs if self._request.logprobs and finish is None else None
        choice = ChatChunkChoice(index=piece.index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(**self._common_fields, system_fingerprint=self._state.fingerprint, choices=(choice,))

    def usage_event(self) -> ChatChunk | None:
        """Returns the event with the usage, or None."""
        if not _wants_usage(self._request):
            return None
        return ChatChunk(
            **self._common_fields, system_fingerprint=self._state.fingerprint, choices=(), usage=self._state.usage
        )


class CompletionWriter:
    """Writes the continuations of prompts."""

    def __init__(self, request: CompletionRequest, state: GenerationState) -> None:
        self._request, self._state = request, state
        self._common_fields = _common_fields("cmpl", request.model)
        self.id: str = self._common_fields["id"]

    def response(self, texts: Sequence[FinishedText]) -> TextCompletion:
        """Returns the answer that has all texts."""
        return self._completion(tuple(map(self._choice, texts)), self._state.usage)

    def chunk(self, piece: ResponsePiece) -> TextCompletion:
        """Returns one event of a stream."""
        return self._completion((self._choice(piece),))

    def usage_event(self) -> TextCompletion | None:
        """Returns the event with the usage, or None."""
        return self._completion((), self._state.usage) if _wants_usage(self._request) else None

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: Usage | None = None) -> TextCompletion:
        return TextCompletion(
            **self._common_fields, system_fingerprint=self._state.fingerprint, choices=choices, usage=usage
        )

    def _choice(self, piece: ResponsePiece) -> CompletionChoice:
        already_streamed = isinstance(piece, FinishedText) and self._request.stream  # with the chunks before
        return CompletionChoice(
            index=piece.index,
            text="" if already_streamed else piece.text,
            logprobs=None if self._request.logprobs is None or already_streamed else piece.completion_logprobs,
            finish_reason=piece.finish if isinstance(piece, FinishedText) else None,
        )


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def _common_fields(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": unix_seconds(datetime.now(UTC)), "model": model}


def unix_seconds(moment: datetime) -> int:
    """Returns a moment in UTC as seconds since 1970."""
    return int(moment.replace(tzinfo=UTC).timestamp())


def event(chunk: ChatChunk | TextCompletion) -> bytes:
    """Returns a chunk as an event of a stream."""
    body = chunk.model_dump(mode="json")
    if body["usage"] is None:
        del body["usage"]
    for choice in body["choices"]:
        if "delta" in choice:
            choice["delta"] = {name: value for name, value in choice["delta"].items() if value is not None}
    return f"data: {json.dumps(body)}\n\n".encode()


def error_event(error: MobizoError) -> bytes:
    """Returns an error in the middle of a stream as an event of it."""
    return f"data: {json.dumps(error_object(error))}\n\n".encode()


async def events(
    first: ResponsePiece, pieces: AsyncGenerator[ResponsePiece, None], writer: Writer
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream to its end; an error on the way is its last event before the end.

    first: the step that came before the response began; pieces: the others, which are closed at the end.
    """
    async with aclosing(pieces):
        yield event(writer.chunk(first))
        try:
            async for piece in pieces:
                yield event(writer.chunk(piece))
        except MobizoError as error:
            yield error_event(error)
        else:
            if (usage := writer.usage_event()) is not None:
                yield event(usage)
        yield DONE


def error_object(error: MobizoError) -> dict[str, Any]:
    """Returns an error as OpenAI's API writes it. An unknown model has OpenAI's code, other errors have ours."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    code, param = error.code, None
    if isinstance(error, Unauthorized):
        kind, code = "authentication_error", "invalid_api_key"
    elif isinstance(error, TooManyRequests):
        kind = "rate_limit_error"
    elif isinstance(error, AdapterNotFound | RevisionNotFound):
        code, param = "model_not_found", "model"
    elif errors := error.extra.get("errors"):
        param = errors[0]["field"]
    return {"error": {"message": error.detail, "type": kind, "param": param, "code": code}}
