"""Hidden states kept by example: what is computed, what is kept, what is handed to the suffix."""

import numpy as np
import pytest

from device_agent.prefix import PrefixCache
from shared.encoding import Example, Row

WIDTH = 3
STATE_BYTES = 4 * WIDTH  # of one token


class Lower:
    """Frozen layers that say which token stood where: hidden = token + position / 8, exact in float32."""

    def __init__(self):
        self.calls = 0

    def prefix(self, tokens):
        self.calls += 1
        states = tokens + np.arange(tokens.shape[1]) / 8
        return np.repeat(states[:, :, None], WIDTH, axis=2).astype(np.float32)


def example(*tokens):
    return Example((Row((9,), (1,)), Row(tuple(tokens), (1,))), 1, False)


EXAMPLES = {0: example(5, 6), 1: example(7), 2: example(1, 2, 3), 3: example(4, 4)}


def ask(cache, indices, length=3, rows=2):
    examples = [EXAMPLES[index] for index in indices]
    tokens = np.zeros((rows, length), np.int64)
    for row, found in enumerate(examples):
        tokens[row, : len(found.right.tokens)] = found.right.tokens
    return cache.hidden(indices, examples, tokens)


def expected(indices, length=3, rows=2):
    hidden = np.zeros((rows, length, WIDTH), np.float32)
    for row, index in enumerate(indices):
        for at, token in enumerate(EXAMPLES[index].right.tokens):
            hidden[row, at] = token + at / 8
    return hidden


@pytest.mark.parametrize("budget", [None, 0, 2 * STATE_BYTES, 5 * STATE_BYTES])
def test_states_are_the_same_whatever_is_kept(budget):
    cache = PrefixCache(Lower(), WIDTH, budget)
    for indices, length in (([0, 1], 3), ([2, 0], 4), ([1, 1], 3), ([3], 3), ([0, 3], 2)):
        np.testing.assert_array_equal(ask(cache, indices, length), expected(indices, length))


def test_an_example_is_computed_once():
    lower = Lower()
    cache = PrefixCache(lower, WIDTH)
    for calls, indices in ((1, [0, 1]), (1, [1, 0]), (2, [1, 2]), (2, [2, 2]), (2, [0, 2])):
        ask(cache, indices)
        assert lower.calls == calls


def test_what_was_let_in_first_stays():
    lower = Lower()
    cache = PrefixCache(lower, WIDTH, 3 * STATE_BYTES)  # examples 0 and 1 fill it
    for calls, indices in ((1, [0, 1]), (2, [2, 0]), (3, [2, 0]), (3, [1, 0])):
        ask(cache, indices)
        assert lower.calls == calls


def test_what_was_handed_out_can_be_written_over():
    cache = PrefixCache(Lower(), WIDTH)
    ask(cache, [0, 1])[:] = 77
    np.testing.assert_array_equal(ask(cache, [0, 1]), expected([0, 1]))
