"""Timing by turns, and random batches to time steps on."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from bench.programs import Compiled
from shared.recipe import DEFAULT_EPS, Recipe
from shared.zo.noise import query_seeds

LR = 1e-3
Batch = tuple[np.ndarray, ...]


def random_batch(recipe: Recipe, vocabulary: int, length: int, number: int) -> Batch:
    """Returns the data inputs of a step: `length` random tokens per example, the answer after the last one."""
    rng = np.random.default_rng(number)
    e, t, c = recipe.effective_batch, recipe.answer_length, recipe.choices
    tokens = rng.integers(0, vocabulary, (e, length))
    choices = rng.integers(0, vocabulary, (e, t, c))
    positions = np.full((e, t), length - 1)
    return tokens, positions, choices, np.ones((e, t, c), np.float32), np.ones((e, t), np.float32)


def by_turns(rounds: int, calls: Mapping[str, Callable[[int], Any]]) -> dict[str, list[float]]:
    """Returns the seconds of each call, `rounds` times in turn after one warm-up, so that all see the same load."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call(number)
            if number:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def ratio(slow: list[float], fast: list[float]) -> float:
    """Returns how many times faster the second call is: the median over turns."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


class Stepper:
    """Runs the `step` method of one program on random batches; a call returns the losses (2q,)."""

    def __init__(self, program: Compiled, length: int) -> None:
        self.recipe, self._vocabulary, self._length = program.recipe, program.manifest.shape.vocabulary, length
        self._methods = program.methods("step")
        self._scalars = np.array([LR], np.float32), np.array([DEFAULT_EPS[self.recipe.precision]], np.float32)

    def __call__(self, number: int) -> np.ndarray:
        batch = random_batch(self.recipe, self._vocabulary, self._length, number)
        return self._methods("step", *batch, query_seeds(0, number, self.recipe.queries), *self._scalars)[0]
