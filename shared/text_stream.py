"""Decodes generated tokens to text incrementally."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

TORN = "\ufffd"  # the decoder's replacement for an incomplete character


class TextStream:
    """Decodes tokens one by one. A character that spans several tokens is returned with its last token."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        """before: the tokens that precede the text, so that the first word is decoded with its leading space."""
        self._tokenizer = tokenizer
        # Complete characters only, because some decoders drop a whole sequence of bytes if one character is incomplete.
        self._shown, self._pending = list(before), list[int]()

    def push(self, token: int) -> str:
        """Returns the text that one more token completes: "" for an incomplete character or a token without text."""
        self._pending.append(token)
        new = self._new()
        # A token without text of its own does not determine the spelling of the next one.
        return self._take() if new and not new.endswith(TORN) else ""

    def flush(self) -> str:
        """Returns the remaining text. Incomplete characters appear as U+FFFD."""
        return self._take()

    def _new(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]

    def _take(self) -> str:
        new = self._new()
        if self._pending:
            # The last piece is sufficient context for decoding the next one.
            self._shown, self._pending = self._pending, []
        return new

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
