"""Accuracy and loss from scores that are known."""

import math

import numpy as np
import pytest

from device_agent.errors import Diverged
from device_agent.evaluation import measure
from device_agent.trainer import Stopped
from shared.encoding import Example, Row
from shared.recipe import BaseRef, Recipe

RECIPE = Recipe(
    base=BaseRef(name="x", sha256="0" * 64),
    queries=1,
    effective_batch=2,
    sequence_length=8,
    answer_length=2,
    choices=2,
)
UNLIKELY = math.log(1e-3)


class Oracle:
    """Scores a token by a table of log-probabilities; all others alike."""

    def __init__(self, table):
        self.table, self.calls = table, 0

    def score(self, batch):
        self.calls += 1
        choices = batch[2]
        return np.vectorize(lambda token: self.table.get(int(token), UNLIKELY))(choices).astype(np.float32)


def example(correct, *answers):
    return Example(tuple(Row((1, 2), answer) for answer in answers), correct, False)


def test_the_highest_sum_of_log_probabilities_answers():
    oracle = Oracle({5: math.log(0.6), 6: math.log(0.3), 7: math.log(0.5), 8: math.log(0.9)})
    # Of the second example, (7, 8) has log 0.45 and (6,) log 0.3.
    measured = measure(oracle, [example(0, (5,), (6,)), example(1, (7, 8), (6,))], RECIPE)
    assert (measured.correct, measured.total) == (1, 2)
    assert measured.accuracy == 0.5
    assert measured.loss == pytest.approx(-(math.log(0.6) + math.log(0.3)) / 2)


def test_the_first_of_equals_answers():
    oracle = Oracle({})
    assert measure(oracle, [example(0, (5,), (6,))], RECIPE).correct == 1
    assert measure(oracle, [example(1, (5,), (6,))], RECIPE).correct == 0


def test_many_examples_take_many_batches_in_order():
    oracle = Oracle({5: -0.1})
    # Two candidates of two tokens need a row each: R = 4 rows hold two examples.
    examples = [example(index % 2, (5, 5), (6, 6)) for index in range(7)]
    pulses = []
    measured = measure(oracle, examples, RECIPE, lambda: pulses.append(1))
    assert oracle.calls == len(pulses) == 4
    assert measured.correct == 4


def test_scores_that_are_no_numbers_mean_divergence():
    with pytest.raises(Diverged, match="lower lr"):
        measure(Oracle({5: math.nan}), [example(0, (5,), (6,))], RECIPE)


def test_a_pulse_can_end_it():
    def stop():
        raise Stopped

    with pytest.raises(Stopped):
        measure(Oracle({}), [example(0, (5,), (6,))], RECIPE, stop)
