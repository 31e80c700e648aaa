"""Generated tokens to text, piece by piece. Knows a tokenizer; knows nothing of who generates or reads."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

TORN = "\ufffd"  # what a decoder shows for bytes that are no whole character


class TextStream:
    """Tokens to text, token by token: a character of several tokens appears with its last."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """before: the tokens that the text follows, so that its first word gets its space."""
        self._tokenizer = tokenizer
        # Whole characters, always: some decoders give up on all bytes in a row where one lacks its fellows.
        self._shown, self._pending = list(before), list[int]()

    def push(self, token: int) -> str:
        """The text that one more token completes; "" while a character lacks bytes, or for a token that is no text."""
        self._pending.append(token)
        new = self._new()
        # What has no text of its own cannot tell how the next piece is spelled.
        return self._take() if new and not new.endswith(TORN) else ""

    def flush(self) -> str:
        """The text of what is left; bytes that are no whole character show as U+FFFD."""
        return self._take()

    def _new(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]

    def _take(self) -> str:
        new = self._new()
        if self._pending:
            # The last piece is enough for the next one to be spelled as it is after it.
            self._shown, self._pending = self._pending, []
        return new

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
