"""Hidden states kept by text: what is computed, what is kept, what is handed to the suffix."""

import numpy as np
import pytest

from device_agent.training.prefix import STRIDE, PrefixCache, UpcomingTexts

WIDTH = 3
STATE_BYTES = 4 * WIDTH  # of one token


class Lower:
    """Frozen layers that say which token stood where: hidden = token + position / 8, exact in float32."""

    def prefix(self, tokens):
        states = tokens + np.arange(tokens.shape[1]) / 8
        return np.repeat(states[:, :, None], WIDTH, axis=2).astype(np.float32)


def cache_of(lower, budget=None):
    return PrefixCache(lower, WIDTH, 2, 3 * STRIDE, dynamic=True, budget=budget)


TEXTS = [(5, 6), (7,), (1, 2, 3), (4, 4)]


def expected(indices, length=3):
    hidden = np.zeros((2, length, WIDTH), np.float32)
    for row, index in enumerate(indices):
        for at, token in enumerate(TEXTS[index]):
            hidden[row, at] = token + at / 8
    return hidden


def test_states_of_tokens_that_are_left_out_are_missing():
    kept = [np.array([0, 2]), np.array([1])]
    hidden = cache_of(Lower()).hidden([TEXTS[2], TEXTS[0]], (2, 2), kept=kept)
    whole = expected([2, 0])
    np.testing.assert_array_equal(hidden[0], whole[0, [0, 2]])
    np.testing.assert_array_equal(hidden[1], [whole[1, 1], [0] * WIDTH])


@pytest.mark.parametrize("upcoming", [(), (3, 2, 1, 0)])
@pytest.mark.parametrize("budget", [None, 0, 2 * STATE_BYTES, 5 * STATE_BYTES])
def test_states_are_the_same_whatever_is_kept(budget, upcoming):
    cache = cache_of(Lower(), budget)
    for indices, length in (([0, 1], 3), ([2, 0], 4), ([1, 1], 3), ([3], 3), ([0, 3], 2)):
        texts, later = ([TEXTS[index] for index in some] for some in (indices, upcoming))
        hidden = cache.hidden(texts, (2, length), UpcomingTexts(later))
        np.testing.assert_array_equal(hidden, expected(indices, length))
