"""Decodes generated tokens to text incrementally."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

REPLACEMENT_CHARACTER = "\ufffd"  # the decoder's replacement for an incomplete character


class TextStream:
    """Decodes tokens one by one. A character that spans several tokens is returned with its last token."""

    def __init__(self, tokenizer: Tokenizer, prompt_tokens: Sequence[int]) -> None:
        """prompt_tokens: the tokens that precede the text, so that the first word is decoded with its leading space."""
        self._tokenizer = tokenizer
        # Complete characters only, because some decoders drop a whole sequence of bytes if one character is incomplete.
        self._decoded_tokens, self._pending_tokens = list(prompt_tokens), list[int]()

    def push(self, token: int) -> str:
        """Returns the text that one more token completes: "" for an incomplete character or a token without text."""
        self._pending_tokens.append(token)
        text = self._new_text()
        # A token without text of its own does not determine the spelling of the next one.
        return self._take_text() if text and not text.endswith(REPLACEMENT_CHARACTER) else ""

    def flush(self) -> str:
        """Returns the remaining text. Incomplete characters appear as U+FFFD."""
        return self._take_text()

    def _new_text(self) -> str:
        return self._decode(self._decoded_tokens + self._pending_tokens)[len(self._decode(self._decoded_tokens)) :]

    def _take_text(self) -> str:
        text = self._new_text()
        if self._pending_tokens:
            # The last piece is sufficient context for decoding the next one.
            self._decoded_tokens, self._pending_tokens = self._pending_tokens, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
