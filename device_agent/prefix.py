"""What a program's frozen lower layers make of each training example, computed once and kept in memory.

In memory, not in a file: hidden states are the user's data in another form, and what is never written need neither be
protected nor checked after a kill. Epochs visit every example once, so what was let in first stays and nothing is
evicted. Knows no journal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from device_agent.memory import spare_bytes
from device_agent.runtimes import F32, Runtime
from shared.encoding import Example

MOST_BYTES = 256 << 20


class PrefixCache:
    """Hidden states before the first adapted layer, by example; those without room are computed at every visit."""

    def __init__(self, runtime: Runtime, width: int, budget: int | None = None) -> None:
        """width: the base's hidden size. budget: bytes kept at most; None: MOST_BYTES, or a quarter of what is free."""
        self._runtime, self._width, self._budget = runtime, width, budget
        self._kept: dict[int, F32] = {}
        self._bytes = 0

    def hidden(self, indices: Sequence[int], examples: Sequence[Example], tokens: NDArray[np.int64]) -> F32:
        """(E, S, hidden) for `suffix`, zero where there is no token.

        indices: of the examples in the training split. tokens: (E, S), the examples packed.
        """
        missing = any(index not in self._kept for index in indices)
        fresh = self._runtime.prefix(tokens) if missing else np.empty(0, np.float32)
        hidden = np.zeros((*tokens.shape, self._width), np.float32)
        for row, (index, example) in enumerate(zip(indices, examples, strict=True)):
            length = len(example.right.tokens)
            state = self._kept.get(index)
            if state is None:
                state = fresh[row, :length]
                self._keep(index, state)
            hidden[row, :length] = state
        return hidden

    def _keep(self, index: int, state: F32) -> None:
        """Lets one example's (length, hidden) in if there is room."""
        if self._budget is None:
            # Not before the program has taken its own memory.
            self._budget = min(MOST_BYTES, spare_bytes() // 4)
        if self._bytes + state.nbytes <= self._budget:
            self._kept[index] = state.copy()
            self._bytes += state.nbytes
