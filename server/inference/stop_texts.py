"""Generated tokens as text that ends at stop texts, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from shared.text_stream import TextStream


class StoppingText:
    """One answer while it is generated. Holds back text that may turn out to be the beginning of a stop text."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stops: Sequence[str]) -> None:
        """before: the tokens that it follows. stops: texts before which it ends."""
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
