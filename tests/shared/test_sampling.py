"""Tokens are drawn from logits by temperature and top-p."""

import numpy as np

from shared.sampling import Sampler


def test_tokens_are_drawn_by_their_chances():
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    logits = np.log(chances).astype(np.float32)

    def shares(**options):
        sampler = Sampler(**{"temperature": 1.0, "top_p": 1.0, "seed": 4} | options)
        tokens = [sampler(logits) for _ in range(4000)]
        return np.bincount(tokens, minlength=4) / len(tokens)

    np.testing.assert_allclose(shares(), chances, atol=0.03)
    hotter = chances**0.5 / (chances**0.5).sum()
    np.testing.assert_allclose(shares(temperature=2.0), hotter, atol=0.03)
    # 0.5 + 0.3 reach 0.7; the others are never drawn.
    np.testing.assert_allclose(shares(top_p=0.7), [0.625, 0.375, 0, 0], atol=0.03)
    assert shares(top_p=0.5)[0] == 1
    assert shares(temperature=0)[0] == 1
