"""One token from a model's logits: the likeliest, or one drawn by temperature and top-p."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadRequest
from shared.generated_text import GeneratedToken

if TYPE_CHECKING:
    from shared.constrained_decoding import Constraint

F32 = NDArray[np.float32]


class Sampler:
    """Chooses the tokens of one text. The same seed chooses the same tokens."""

    def __init__(
        self, temperature: float, top_p: float, seed: int, drawn: int = 0, constraint: Constraint | None = None
    ) -> None:
        """temperature: divides the logits; 0 selects the likeliest token.

        top_p: only the likeliest tokens with this total probability are drawn. drawn: tokens of the text that an
        earlier sampler has chosen. constraint: which tokens may come next. Raises BadRequest for a temperature that is
        negative or not finite.
        """
        if not 0 <= temperature < math.inf:
            raise BadRequest(f"temperature {temperature} is not a finite number of at least 0")
        self._temperature, self._top_p, self._constraint = temperature, top_p, constraint
        self._random = np.random.default_rng(seed)
        self._random.random(drawn)  # a choice takes one number

    def __call__(self, logits: F32) -> int:
        """Returns a token, given the logits (V,). Ties go to the first token. Raises the errors of the constraint."""
        if self._constraint is None:
            return self._choose(logits)
        token = self._choose(self._constraint.mask(logits))
        self._constraint.accept(token)
        return token

    def _choose(self, logits: F32) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        scaled_logits = logits.astype(np.float64) / self._temperature
        probabilities = np.exp(scaled_logits - scaled_logits.max())
        probabilities /= probabilities.sum()
        if self._top_p < 1:
            order = np.argsort(-probabilities, kind="stable")
            preceding = np.cumsum(probabilities[order]) - probabilities[order]  # total probability of likelier tokens
            probabilities[order[preceding >= self._top_p]] = 0
            probabilities /= probabilities.sum()
        return int(self._random.choice(len(probabilities), p=probabilities))


def log_softmax(logits: F32) -> NDArray[np.float64]:
    """Returns the log-probabilities (V,) of logits (V,), nats."""
    values = logits.astype(np.float64)
    values -= values.max()
    shifted: NDArray[np.float64] = values - np.log(np.exp(values).sum())
    return shifted


def generated_token(token: int, logits: F32, count: int | None) -> GeneratedToken:
    """Returns a token with its log-probability and the `count` likeliest tokens with theirs, in nats, from logits (V,).

    count: None returns the token alone.
    """
    if count is None:
        return GeneratedToken(token=token)
    values = log_softmax(logits)
    top_tokens = tuple((int(index), float(values[index])) for index in np.argsort(-values, kind="stable")[:count])
    return GeneratedToken(token=token, log_probability=float(values[token]), likeliest=top_tokens)
