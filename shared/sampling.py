"""One token from a model's logits: the likeliest, or one drawn by temperature and top-p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.generated_text import GeneratedToken

F32 = NDArray[np.float32]


class Sampler:
    """Chooses the tokens of one text. The same seed chooses the same tokens."""

    def __init__(self, temperature: float, top_p: float, seed: int) -> None:
        """temperature: divides the logits; 0 takes the likeliest. top_p: the likeliest of that share are drawn from."""
        self._temperature, self._top_p = temperature, top_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: F32) -> int:
        """A token by its logits (V,); of equals the first."""
        if self._temperature == 0:
            return int(logits.argmax())
        values = logits.astype(np.float64) / self._temperature
        chances = np.exp(values - values.max())
        chances /= chances.sum()
        if self._top_p < 1:
            order = np.argsort(-chances, kind="stable")
            before = np.cumsum(chances[order]) - chances[order]  # of all that are likelier
            chances[order[before >= self._top_p]] = 0
            chances /= chances.sum()
        return int(self._random.choice(len(chances), p=chances))


def reported(token: int, logits: F32, most: int | None) -> GeneratedToken:
    """Returns a token with its log-probability by its logits (V,), and the `most` likeliest tokens with theirs, nats.

    most: None reports the token alone.
    """
    if most is None:
        return GeneratedToken(token=token)
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    likeliest = tuple((int(each), float(values[each])) for each in np.argsort(-values, kind="stable")[:most])
    return GeneratedToken(token=token, log_probability=float(values[token]), likeliest=likeliest)
