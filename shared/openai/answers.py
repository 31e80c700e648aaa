"""Generated texts as OpenAI's API writes them: whole answers, the events of streams, and errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from tokenizers import Tokenizer

from shared.errors import AdapterNotFound, MobizoError, RevisionNotFound, TooManyRequests, Unauthorized
from shared.generated_text import GeneratedToken
from shared.openai.models import (
    COMPLETION_TOKENS,
    Answer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatRequest,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    Delta,
    Finish,
    LikelyToken,
    Usage,
)
from shared.recipe import MAX_SEED
from shared.scoring import MOST_NEW_TOKENS

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class TextOptions:
    """How one text of a request is generated. likeliest: tokens reported at each place; None: no log-probabilities."""

    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop: tuple[str, ...]
    likeliest: int | None

    @classmethod
    def of(cls, request: ChatRequest | CompletionRequest, number: int) -> TextOptions:
        """Returns the options of text `number` of a request. Each text has a seed of its own."""
        chat = isinstance(request, ChatRequest)
        most = request.max_completion_tokens if isinstance(request, ChatRequest) else None
        seed = secrets.randbelow(MAX_SEED) if request.seed is None else (request.seed + number) % (MAX_SEED + 1)
        return cls(
            max_tokens=most or request.max_tokens or (MOST_NEW_TOKENS if chat else COMPLETION_TOKENS),
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            seed=seed,
            stop=request.stops,
            likeliest=request.likeliest if isinstance(request, ChatRequest) else request.logprobs,
        )


@dataclass(frozen=True)
class Step:
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
                    **self._likely(each.token, each.log_probability or 0.0).model_dump(),
                    top_logprobs=tuple(self._likely(token, chance) for token, chance in each.likeliest),
                )
                for each in self.tokens
            )
        )

    @property
    def completion_logprobs(self) -> CompletionLogprobs:
        """The log-probabilities of its tokens, as completions have them."""
        words = [self._spelling(each.token) for each in self.tokens]
        offsets, at = [], self.start
        for word in words:
            offsets.append(at)
            at += len(word)
        return CompletionLogprobs(
            tokens=tuple(words),
            token_logprobs=tuple(each.log_probability or 0.0 for each in self.tokens),
            top_logprobs=tuple(
                {self._spelling(token): chance for token, chance in each.likeliest} for each in self.tokens
            ),
            text_offset=tuple(offsets),
        )

    def _likely(self, token: int, chance: float) -> LikelyToken:
        word = self._spelling(token)
        return LikelyToken(token=word, logprob=chance, bytes=tuple(word.encode()))

    def _spelling(self, token: int) -> str:
        text: str = self.tokenizer.decode([token], skip_special_tokens=False)
        return text


@dataclass(frozen=True)
class Ended(Step):
    """A whole text, and why it ended."""

    finish: Finish = "stop"


class Answers(Protocol):
    """What is known of a request's texts: with the first step, and final at the end."""

    fingerprint: str | None

    @property
    def usage(self) -> Usage:
        """The tokens so far."""


class Writer(Protocol):
    """Writes the texts of one request."""

    def whole(self, ended: Sequence[Ended]) -> ChatCompletion | Completion:
        """Returns the answer that has all texts, in the request's order."""

    def chunk(self, step: Step) -> ChatChunk | Completion:
        """Returns one event of a stream."""

    def last(self) -> ChatChunk | Completion | None:
        """Returns the event that follows all texts, if the request asked for usage."""


class ChatWriter:
    """Writes the answers to a conversation."""

    def __init__(self, request: ChatRequest, answers: Answers) -> None:
        self._request, self._answers = request, answers
        self._about = _about("chatcmpl", request.model)

    def whole(self, ended: Sequence[Ended]) -> ChatCompletion:
        """Returns the answer that has all texts."""
        choices = tuple(
            ChatChoice(
                index=each.index,
                message=Answer(content=each.text),
                logprobs=each.chat_logprobs if self._request.logprobs else None,
                finish_reason=each.finish,
            )
            for each in ended
        )
        return ChatCompletion(
            **self._about, system_fingerprint=self._answers.fingerprint, choices=choices, usage=self._answers.usage
        )

    def chunk(self, step: Step) -> ChatChunk:
        """Returns one event of a stream."""
        last = isinstance(step, Ended)
        delta = Delta() if last else Delta(content=step.text, role="assistant" if step.first else None)
        logprobs = step.chat_logprobs if self._request.logprobs and not last else None
        finish = step.finish if isinstance(step, Ended) else None
        choice = ChatChunkChoice(index=step.index, delta=delta, logprobs=logprobs, finish_reason=finish)
        return ChatChunk(**self._about, system_fingerprint=self._answers.fingerprint, choices=(choice,))

    def last(self) -> ChatChunk | None:
        """Returns the event with the usage, or None."""
        if not _wants_usage(self._request):
            return None
        return ChatChunk(
            **self._about, system_fingerprint=self._answers.fingerprint, choices=(), usage=self._answers.usage
        )


class CompletionWriter:
    """Writes the continuations of prompts."""

    def __init__(self, request: CompletionRequest, answers: Answers) -> None:
        self._request, self._answers = request, answers
        self._about = _about("cmpl", request.model)

    def whole(self, ended: Sequence[Ended]) -> Completion:
        """Returns the answer that has all texts."""
        return self._completion(tuple(map(self._choice, ended)), self._answers.usage)

    def chunk(self, step: Step) -> Completion:
        """Returns one event of a stream."""
        return self._completion((self._choice(step),))

    def last(self) -> Completion | None:
        """Returns the event with the usage, or None."""
        return self._completion((), self._answers.usage) if _wants_usage(self._request) else None

    def _completion(self, choices: tuple[CompletionChoice, ...], usage: Usage | None = None) -> Completion:
        return Completion(**self._about, system_fingerprint=self._answers.fingerprint, choices=choices, usage=usage)

    def _choice(self, step: Step) -> CompletionChoice:
        sent = isinstance(step, Ended) and self._request.stream  # with the chunks before
        return CompletionChoice(
            index=step.index,
            text="" if sent else step.text,
            logprobs=None if self._request.logprobs is None or sent else step.completion_logprobs,
            finish_reason=step.finish if isinstance(step, Ended) else None,
        )


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and request.stream_options.include_usage


def _about(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"{kind}-{secrets.token_hex(12)}", "created": seconds(datetime.now(UTC)), "model": model}


def seconds(moment: datetime) -> int:
    """Returns a moment in UTC as seconds since 1970."""
    return int(moment.replace(tzinfo=UTC).timestamp())


def event(chunk: ChatChunk | Completion) -> bytes:
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


async def events(first: Step, steps: AsyncGenerator[Step, None], writer: Writer) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream to its end; an error on the way is its last event before the end.

    first: the step that came before the response began; steps: the others, which are closed at the end.
    """
    async with aclosing(steps):
        yield event(writer.chunk(first))
        try:
            async for step in steps:
                yield event(writer.chunk(step))
        except MobizoError as error:
            yield error_event(error)
        else:
            if (usage := writer.last()) is not None:
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
