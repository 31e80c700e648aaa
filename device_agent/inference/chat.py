"""A chat with a personal model: formats the prompt and streams the answer as text.

Tokenizer files contain no chat template. ChatML is supported for models trained with it; other models continue the
plain text.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from device_agent.inference.personal_model import PersonalModel
from shared.errors import BadRequest
from shared.text_stream import TextStream

Form = Literal["plain", "chatml"]

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
CHAT_NAMES = ("instruct", "chat")  # in the name of a base that was trained on conversations


def default_format(tokenizer: Tokenizer, base: str) -> tuple[Form, str]:
    """Returns the prompt format for a base model, and the reason."""
    if not _has_chatml(tokenizer):
        return "plain", "the tokenizer has no ChatML tokens; the model continues your text"
    if any(word in base.lower() for word in CHAT_NAMES):
        return "chatml", f"{base} uses ChatML; your text is a turn of a conversation"
    return (
        "plain",
        f"{base} is not named as a chat model, so it continues your text; --form chatml uses ChatML",
    )


def _has_chatml(tokenizer: Tokenizer) -> bool:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return {OPEN, CLOSE} <= special


@dataclass
class Chat:
    """One conversation. most: maximum tokens per answer. temperature, seed: as in `InferenceSession.generate`."""

    model: PersonalModel
    form: Form
    most: int = 128
    temperature: float = 0.0
    seed: int = 0
    ended: str = field(default="", init=False)  # why the last answer ended
    forgotten: int = field(default=0, init=False)  # turns that no longer fit
    _turns: list[list[int]] = field(default_factory=list, init=False)
    _answers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises BadRequest if the tokenizer lacks ChatML's tokens."""
        if self.form == "chatml" and not _has_chatml(self.model.tokenizer):
            raise BadRequest(f"the tokenizer lacks {OPEN} and {CLOSE} of ChatML; use --form plain")

    def use(self, model: PersonalModel) -> None:
        """Switches to another model; drops the history if its tokenizer differs."""
        if model.manifest.file("tokenizer") != self.model.manifest.file("tokenizer"):
            self.forgotten += len(self._turns)
            self._turns.clear()
        self.model = model

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yields pieces of the answer to `text`; close the generator to stop.

        Raises BadRequest if the text alone exceeds the context.
        """
        turn = self._turn(text)
        self._forget(turn)
        tokens = [token for past in self._turns for token in past] + turn
        most = min(self.most, self.model.context - len(tokens) + 1)
        if most < 1:
            raise BadRequest(
                f"the text has {len(turn)} tokens; text and answer share {self.model.context}: shorten the text"
            )
        generated = self.model.inference.generate(
            tokens, most, temperature=self.temperature, seed=self.seed + self._answers
        )
        self._answers += 1
        return self._stream(turn, generated, "the context is full" if most < self.most else f"{most} tokens")

    def _stream(self, turn: list[int], generated: Iterator[int], limit: str) -> Generator[str, None, None]:
        stream, generated_tokens = TextStream(self.model.tokenizer, turn), list[int]()
        special = {token for token, added in self.model.tokenizer.get_added_tokens_decoder().items() if added.special}
        self.ended = "stopped"
        try:
            for token in generated:
                # The first special token ends the answer, whichever one the base was trained on.
                if token in special:
                    self.ended = "the answer is complete"
                    break
                generated_tokens.append(token)
                if piece := stream.push(token):
                    yield piece
            else:
                self.ended = limit
            if piece := stream.flush():
                yield piece
        finally:
            if self.form == "chatml":
                self._turns.append(turn + generated_tokens + self._mark(CLOSE) + self._plain("\n"))

    def _turn(self, text: str) -> list[int]:
        """Returns the tokens of a user turn, up to where the answer begins."""
        if self.form == "plain":
            tokens: list[int] = self.model.tokenizer.encode(text).ids
            return tokens
        user, assistant = self._plain(f"user\n{text}"), self._plain("assistant\n")
        newline = self._plain("\n")
        return [*self._mark(OPEN), *user, *self._mark(CLOSE), *newline, *self._mark(OPEN), *assistant]

    def _forget(self, turn: list[int]) -> None:
        """Drops the oldest turns until the new one and its longest answer fit."""
        while self._turns and sum(map(len, self._turns)) + len(turn) + self.most - 1 > self.model.context:
            self._turns.pop(0)
            self.forgotten += 1

    def _mark(self, mark: str) -> list[int]:
        tokens: list[int] = self.model.tokenizer.encode(mark, add_special_tokens=False).ids
        return tokens

    def _plain(self, text: str) -> list[int]:
        """Returns a text's tokens, in which special tokens typed by the user are plain text."""
        tokenizer = self.model.tokenizer
        tokenizer.encode_special_tokens = True
        try:
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            tokenizer.encode_special_tokens = False
        return tokens
