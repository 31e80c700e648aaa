"""Generated tokens as text that ends at stop texts, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from tokenizers import Tokenizer

from shared.text_stream import TextStream


class GeneratedToken(BaseModel):
    """A generated token. Log-probabilities are the model's own, in nats, whatever the temperature."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the likeliest first


@dataclass(frozen=True)
class Piece:
    """A piece of a text, and the tokens generated since the previous piece. A stop text has tokens but no piece."""

    text: str
    tokens: tuple[GeneratedToken, ...]


class TextPieces:
    """One text while it is generated, from tokens to pieces."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stops: Sequence[str], *, silent: bool) -> None:
        """before, stops: as of `StoppingText`. silent: also return tokens at the end that have no text."""
        self._text, self._silent = StoppingText(tokenizer, before, stops), silent
        self._tokens: list[GeneratedToken] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text.text

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""
        return self._text.tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop text has ended it."""
        return self._text.stopped

    def push(self, token: GeneratedToken) -> Piece | None:
        """Adds a token; returns the piece that can be shown, if any."""
        self._tokens.append(token)
        shown = self._text.push(token.token)
        return self._piece(shown) if shown else None

    def finish(self) -> Piece | None:
        """Returns the piece that was held back, if any."""
        shown = self._text.finish()
        return self._piece(shown) if shown or (self._tokens and self._silent and not self.stopped) else None

    def _piece(self, text: str) -> Piece:
        piece = Piece(text, tuple(self._tokens))
        self._tokens.clear()
        return piece


class StoppingText:
    """One answer while it is generated. Holds back text that may turn out to be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stops: Sequence[str]) -> None:
        """before: the prompt's tokens. stops: texts that end the answer, which does not contain them."""
        self._stream, self._stops = TextStream(tokenizer, before), stops
        self._given = 0  # characters
        self.text = ""
        self.tokens = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token; returns the text that can be shown."""
        self.tokens += 1
        return self._let_out(self._stream.push(token), last=False)

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._let_out(self._stream.flush(), last=True)

    def _let_out(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self.text += piece
        ends = [end for stop in self._stops if (end := self.text.find(stop, self._given)) >= 0]
        if ends:
            self.text, self.stopped = self.text[: min(ends)], True
        until = len(self.text) if last or self.stopped else len(self.text) - self._held()
        out = self.text[self._given : until]
        self._given = max(self._given, until)
        return out

    def _held(self) -> int:
        """Returns the number of characters at the end with which a stop text may begin."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self.text) - self._given), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return size
        return 0
