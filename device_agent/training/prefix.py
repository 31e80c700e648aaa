"""Caches the outputs of a program's frozen lower layers for each training example, in memory.

Hidden states are user data in another form, so they are not written to disk. Every epoch visits each example once, so
the first cached states stay and none is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from device_agent.memory import spare_bytes
from device_agent.runtimes import F32, Runtime
from shared.zo.encoding import Example

MOST_BYTES = 256 << 20
STRIDE = 16  # tokens: an example's state is computed at its own length rounded up to a multiple


class PrefixCache:
    """Hidden states before the first adapted layer, by example; examples that do not fit are computed at every
    visit.

    An example's state is computed at a length that depends on this example only, because kernels may sum longer rows in
    another order and the run must not depend on batch composition.
    """

    def __init__(self, runtime: Runtime, width: int, bound: int, *, dynamic: bool, budget: int | None = None) -> None:
        """width: the base's hidden size. bound: the recipe's S. dynamic: the manifest's `dynamic_length`.

        budget: cache size in bytes; default: MOST_BYTES or a quarter of the available memory.
        """
        self._runtime, self._width, self._bound, self._dynamic = runtime, width, bound, dynamic
        self._budget = budget
        self._kept: dict[int, F32] = {}
        self._bytes = 0

    def hidden(self, indices: Sequence[int], examples: Sequence[Example], tokens: NDArray[np.int64]) -> F32:
        """Returns hidden states (E, S, hidden) for `suffix`, zero at padding.

        indices: of the examples in the training split. tokens: (E, S), the packed examples.
        """
        states = {index: self._kept[index] for index in indices if index in self._kept}
        missing: dict[int, dict[int, Example]] = {}
        for index, example in zip(indices, examples, strict=True):
            if index not in states:
                missing.setdefault(self._length(example), {})[index] = example
        for length, group in missing.items():
            packed = np.zeros((len(tokens), length), tokens.dtype)
            for row, example in enumerate(group.values()):
                packed[row, : len(example.right.tokens)] = example.right.tokens
            fresh = self._runtime.prefix(packed)
            for row, (index, example) in enumerate(group.items()):
                states[index] = fresh[row, : len(example.right.tokens)]
                self._keep(index, states[index])
        hidden = np.zeros((*tokens.shape, self._width), np.float32)
        for row, index in enumerate(indices):
            hidden[row, : len(states[index])] = states[index]
        return hidden

    def _length(self, example: Example) -> int:
        """Returns the length at which the example's state is computed."""
        own = -(-len(example.right.tokens) // STRIDE) * STRIDE
        return min(own, self._bound) if self._dynamic else self._bound

    def _keep(self, index: int, state: F32) -> None:
        """Caches one example's state (length, hidden) if it fits."""
        if self._budget is None:
            # Not before the program has taken its own memory.
            self._budget = min(MOST_BYTES, spare_bytes() // 4)
        if self._bytes + state.nbytes <= self._budget:
            self._kept[index] = state.copy()
            self._bytes += state.nbytes
