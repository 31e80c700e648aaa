"""Hidden states kept by example: what is computed, what is kept, what is handed to the suffix."""

import numpy as np
import pytest

from device_agent.training.prefix import STRIDE, PrefixCache
from shared.zo.encoding import Example, Row

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


def cache_of(lower, budget=None, bound=3 * STRIDE):
    return PrefixCache(lower, WIDTH, bound, dynamic=True, budget=budget)


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
    cache = cache_of(Lower(), budget)
    for indices, length in (([0, 1], 3), ([2, 0], 4), ([1, 1], 3), ([3], 3), ([0, 3], 2)):
        np.testing.assert_array_equal(ask(cache, indices, length), expected(indices, length))


def test_an_example_is_computed_once():
    lower = Lower()
    cache = cache_of(lower)
    for calls, indices in ((1, [0, 1]), (1, [1, 0]), (2, [1, 2]), (2, [2, 2]), (2, [0, 2])):
        ask(cache, indices)
        assert lower.calls == calls


def test_what_was_let_in_first_stays():
    lower = Lower()
    cache = cache_of(lower, 3 * STATE_BYTES)  # examples 0 and 1 fill it
    for calls, indices in ((1, [0, 1]), (2, [2, 0]), (3, [2, 0]), (3, [1, 0])):
        ask(cache, indices)
        assert lower.calls == calls


class LengthDependent(Lower):
    """Frozen layers whose last bits depend on how long a row is padded, as a real kernel's may."""

    def __init__(self):
        super().__init__()
        self.lengths = []

    def prefix(self, tokens):
        self.lengths.append(tokens.shape[1])
        return super().prefix(tokens) + np.float32(tokens.shape[1] / 4096)


@pytest.mark.parametrize("budget", [None, 0])
def test_a_state_does_not_depend_on_the_batch_in_which_it_was_computed(budget):
    long = {4: example(*range(1, STRIDE + 2))}
    EXAMPLES.update(long)
    alone, together = cache_of(LengthDependent(), budget), cache_of(LengthDependent(), budget)
    length = STRIDE + 1
    ask(together, [4, 0], length)
    np.testing.assert_array_equal(ask(alone, [0], length)[0], ask(together, [0], length)[0])
    np.testing.assert_array_equal(ask(alone, [4], length)[0], ask(together, [4], length)[0])


@pytest.mark.parametrize(("dynamic", "expected_lengths"), [(True, [STRIDE, STRIDE + 1]), (False, [STRIDE + 1])])
def test_states_are_computed_at_whole_strides_up_to_the_bound(dynamic, expected_lengths):
    EXAMPLES[4] = example(*range(1, STRIDE + 2))
    lower = LengthDependent()
    cache = PrefixCache(lower, WIDTH, STRIDE + 1, dynamic=dynamic)
    ask(cache, [0, 4], STRIDE + 1)
    assert lower.lengths == expected_lengths


def test_what_was_handed_out_can_be_written_over():
    cache = cache_of(Lower())
    ask(cache, [0, 1])[:] = 77
    np.testing.assert_array_equal(ask(cache, [0, 1]), expected([0, 1]))
