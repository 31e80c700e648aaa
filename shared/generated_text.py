"""Generated tokens, and their text, which ends at stop texts."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from shared.strict_model import StrictModel
from shared.text_stream import TextStream


class GeneratedToken(StrictModel):
    """A generated token. Log-probabilities are the model's own, in nats, whatever the temperature."""

    token: int
    log_probability: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()  # (token, log-probability), the likeliest first


class StopTextFilter:
    """Decodes one answer while it is generated, and withholds text that may be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int], stop_texts: Sequence[str]) -> None:
        """stop_texts: texts that end the answer, which does not contain them."""
        self._stream, self._stop_texts = TextStream(tokenizer, prompt_tokens), stop_texts
        self._released_length = 0  # characters
        self.text = ""
        self.tokens = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token and returns the text that can be shown."""
        self.tokens += 1
        return self._release(self._stream.push(token), last=False)

    def finish(self) -> str:
        """Returns the text that was held back."""
        return self._release(self._stream.flush(), last=True)

    def _release(self, piece: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        self.text += piece
        stop_positions = [
            position for stop in self._stop_texts if (position := self.text.find(stop, self._released_length)) >= 0
        ]
        if stop_positions:
            self.text, self.stopped = self.text[: min(stop_positions)], True
        end = len(self.text) if last or self.stopped else len(self.text) - self._held_length()
        released = self.text[self._released_length : end]
        self._released_length = max(self._released_length, end)
        return released

    def _held_length(self) -> int:
        """Returns the number of characters at the end that may begin a stop text."""
        longest = max((len(stop) - 1 for stop in self._stop_texts), default=0)
        for length in range(min(longest, len(self.text) - self._released_length), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop_texts):
                return length
        return 0
