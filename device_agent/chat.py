"""A conversation with a personal model: what it is asked in which form, and its answer as text, as it comes.

A tokenizer's file carries no chat template. The one form known here is ChatML, which some bases were trained on; every
other base goes on with the text as it stands. Knows no command line.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from device_agent.personal import PersonalModel
from shared.errors import BadRequest
from shared.text_stream import TextStream

Form = Literal["plain", "chatml"]

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
TRAINED = ("instruct", "chat")  # in the name of a base that was trained on conversations


def known_form(tokenizer: Tokenizer, base: str) -> tuple[Form, str]:
    """The form for a base by its tokenizer and name, and why, in words."""
    if not _has_marks(tokenizer):
        return "plain", "the tokenizer has no chat marks that are known here; your text is gone on with as it stands"
    if any(word in base.lower() for word in TRAINED):
        return "chatml", f"{base} has ChatML's marks: your text is a turn of a conversation"
    return (
        "plain",
        f"{base} does not say that it was trained on conversations; --form chatml uses its marks all the same",
    )


def _has_marks(tokenizer: Tokenizer) -> bool:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    return {OPEN, CLOSE} <= special


@dataclass
class Chat:
    """One conversation. most: tokens of an answer. temperature, seed: as in `Inference.generate`."""

    model: PersonalModel
    form: Form
    most: int = 128
    temperature: float = 0.0
    seed: int = 0
    ended: str = field(default="", init=False)  # why the last answer ended, in words
    forgotten: int = field(default=0, init=False)  # turns that no longer fit
    _turns: list[list[int]] = field(default_factory=list, init=False)
    _asked: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        """Raises BadRequest if the tokenizer lacks the form's marks."""
        if self.form == "chatml" and not _has_marks(self.model.tokenizer):
            raise BadRequest(f"the tokenizer lacks {OPEN} and {CLOSE}, so there is no ChatML; use --form plain")

    def use(self, model: PersonalModel) -> None:
        """Goes on with another model; what was said is forgotten if its tokens mean something else there."""
        if model.manifest.file("tokenizer") != self.model.manifest.file("tokenizer"):
            self.forgotten += len(self._turns)
            self._turns.clear()
        self.model = model

    def answer(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer to `text` as they come; whoever has enough closes the iterator.

        Raises BadRequest if the text alone does not fit the context.
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
            tokens, most, temperature=self.temperature, seed=self.seed + self._asked
        )
        self._asked += 1
        return self._stream(turn, generated, "the context is full" if most < self.most else f"{most} tokens")

    def _stream(self, turn: list[int], generated: Iterator[int], limit: str) -> Generator[str, None, None]:
        stream, said = TextStream(self.model.tokenizer, turn), list[int]()
        special = {token for token, how in self.model.tokenizer.get_added_tokens_decoder().items() if how.special}
        self.ended = "stopped"
        try:
            for token in generated:
                # No special token is text; the first one ends the answer, whichever the base was trained on.
                if token in special:
                    self.ended = "the answer is complete"
                    break
                said.append(token)
                if piece := stream.push(token):
                    yield piece
            else:
                self.ended = limit
            if piece := stream.flush():
                yield piece
        finally:
            if self.form == "chatml":
                self._turns.append(turn + said + self._mark(CLOSE) + self._plain("\n"))

    def _turn(self, text: str) -> list[int]:
        """A person's words as tokens, up to where the answer begins."""
        if self.form == "plain":
            tokens: list[int] = self.model.tokenizer.encode(text).ids
            return tokens
        asked, answered = self._plain(f"user\n{text}"), self._plain("assistant\n")
        line = self._plain("\n")
        return [*self._mark(OPEN), *asked, *self._mark(CLOSE), *line, *self._mark(OPEN), *answered]

    def _forget(self, turn: list[int]) -> None:
        """Drops the oldest turns until the new one and its longest answer fit."""
        while self._turns and sum(map(len, self._turns)) + len(turn) + self.most - 1 > self.model.context:
            self._turns.pop(0)
            self.forgotten += 1

    def _mark(self, mark: str) -> list[int]:
        tokens: list[int] = self.model.tokenizer.encode(mark, add_special_tokens=False).ids
        return tokens

    def _plain(self, text: str) -> list[int]:
        """A text's tokens; marks that a person wrote are text like any other."""
        tokenizer = self.model.tokenizer
        tokenizer.encode_special_tokens = True
        try:
            tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            tokenizer.encode_special_tokens = False
        return tokens
