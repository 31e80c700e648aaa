"""The texts of one request of OpenAI's API, which are generated at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from tokenizers import Tokenizer

from server.inference.frames import GeneratedToken
from server.inference.openai.models import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    Finish,
    LikelyToken,
    Usage,
)
from server.inference.responses import Piece, TextGeneration
from shared.scoring import GenerateResult


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


class Choices:
    """The texts of one request. usage and fingerprint are known with the first step, and final at the end."""

    def __init__(self, texts: Sequence[TextGeneration]) -> None:
        self._texts = texts
        self._generated = 0
        self.fingerprint: str | None = None

    @property
    def usage(self) -> Usage:
        """The tokens so far. A prompt counts once, however many texts follow it."""
        prompts = {id(text.request.prompt): text.prompt_tokens for text in self._texts}
        read = sum(prompts.values())
        return Usage(prompt_tokens=read, completion_tokens=self._generated, total_tokens=read + self._generated)

    async def whole(self) -> list[Ended]:
        """Returns the texts in the request's order. Raises the errors of the request or of the scorer."""
        async with aclosing(self.steps()) as steps:
            ended = [step async for step in steps if isinstance(step, Ended)]
        return sorted(ended, key=lambda each: each.index)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Yields the pieces of all texts as they come, and each text's end. Close the iterator to cancel all."""
        if len(self._texts) == 1:
            async with aclosing(self._one(0)) as steps:
                async for step in steps:
                    yield step
            return
        queue: asyncio.Queue[Step | Exception | None] = asyncio.Queue(maxsize=len(self._texts))
        tasks = [asyncio.create_task(self._fill(queue, index)) for index in range(len(self._texts))]
        try:
            left = len(tasks)
            while left:
                given = await queue.get()
                if isinstance(given, Exception):
                    raise given
                if given is None:
                    left -= 1
                else:
                    yield given
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, queue: asyncio.Queue[Step | Exception | None], index: int) -> None:
        try:
            async with aclosing(self._one(index)) as steps:
                async for step in steps:
                    await queue.put(step)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def _one(self, index: int) -> AsyncGenerator[Step, None]:
        generation = self._texts[index]
        tokens: list[GeneratedToken] = []
        start = 0
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Piece):
                    tokens += piece.tokens
                    yield Step(index, piece.text, piece.tokens, generation.tokenizer, start)
                    start += len(piece.text)
                else:
                    yield self._ended(index, piece, tuple(tokens), generation.tokenizer)

    def _ended(
        self, index: int, result: GenerateResult, tokens: tuple[GeneratedToken, ...], tokenizer: Tokenizer
    ) -> Ended:
        self._generated += result.tokens
        self.fingerprint = result.revision
        return Ended(index, result.text, tokens, tokenizer, finish=result.finish)
