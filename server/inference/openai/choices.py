"""The texts of one request of OpenAI's API, which are generated at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from tokenizers import Tokenizer

from server.inference.responses import TextGeneration
from shared.generated_text import GeneratedToken, Piece
from shared.openai.answers import FinishedText, ResponsePiece
from shared.openai.models import Usage
from shared.scoring import GenerateResult


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

    async def whole(self) -> list[FinishedText]:
        """Returns the texts in the request's order. Raises the errors of the request or of the scorer."""
        async with aclosing(self.steps()) as steps:
            ended = [step async for step in steps if isinstance(step, FinishedText)]
        return sorted(ended, key=lambda each: each.index)

    async def steps(self) -> AsyncGenerator[ResponsePiece, None]:
        """Yields the pieces of all texts as they come, and each text's end. Close the iterator to cancel all."""
        if len(self._texts) == 1:
            async with aclosing(self._one(0)) as steps:
                async for step in steps:
                    yield step
            return
        queue: asyncio.Queue[ResponsePiece | Exception | None] = asyncio.Queue(maxsize=len(self._texts))
        tasks = [asyncio.create_task(self._fill(queue, index)) for index in range(len(self._texts))]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _fill(self, queue: asyncio.Queue[ResponsePiece | Exception | None], index: int) -> None:
        try:
            async with aclosing(self._one(index)) as steps:
                async for step in steps:
                    await queue.put(step)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    async def _one(self, index: int) -> AsyncGenerator[ResponsePiece, None]:
        generation = self._texts[index]
        tokens: list[GeneratedToken] = []
        start = 0
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Piece):
                    tokens += piece.tokens
                    yield ResponsePiece(index, piece.text, piece.tokens, generation.tokenizer, start)
                    start += len(piece.text)
                else:
                    yield self._ended(index, piece, tuple(tokens), generation.tokenizer)

    def _ended(
        self, index: int, result: GenerateResult, tokens: tuple[GeneratedToken, ...], tokenizer: Tokenizer
    ) -> FinishedText:
        self._generated += result.tokens
        self.fingerprint = result.revision
        return FinishedText(index, result.text, tokens, tokenizer, finish=result.finish)
