"""Accuracy and loss from scores that are known."""

import math

import numpy as np
import pytest

from device_agent.errors import Diverged
from device_agent.training.evaluation import best_b, log_probabilities, split_metrics
from shared.recipe import BaseRef, Recipe
from shared.zo.encoding import Example, Row

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
        self.table, self.lengths = table, []

    def score(self, batch, _hidden=None):
        self.lengths.append(batch[0].shape[1])
        return np.vectorize(lambda token: self.table.get(int(token), UNLIKELY))(batch[2]).astype(np.float32)


def example(correct, *answers):
    return Example(tuple(Row((1, 2), answer) for answer in answers), correct, False)


def test_the_highest_sum_of_log_probabilities_answers():
    oracle = Oracle({5: math.log(0.6), 6: math.log(0.3), 7: math.log(0.5), 8: math.log(0.9)})
    # Of the second example, (7, 8) has log 0.45 and (6,) log 0.3.
    examples = [example(0, (5,), (6,)), example(1, (7, 8), (6,))]
    measured = split_metrics(examples, log_probabilities(oracle, examples, RECIPE), RECIPE)
    assert (measured.correct, measured.total) == (1, 2)
    assert measured.accuracy == 0.5
    assert measured.loss == pytest.approx(-(math.log(0.6) + math.log(0.3)) / 2)


def test_like_lengths_share_batches_and_results_keep_their_order():
    lengths = (3, 7, 2, 7, 3, 2, 6)
    examples = [Example((Row((1,) * length, (10 + at,)),), 0, False) for at, length in enumerate(lengths)]
    oracle = Oracle({10 + at: -float(at) for at in range(7)})
    assert log_probabilities(oracle, examples, RECIPE, dynamic=True) == [[-float(at)] for at in range(7)]
    assert oracle.lengths == [3, 7]


class ManyOracles:
    """A program of which each B (1,) has a table of its own."""

    def __init__(self, *tables):
        self.tables = tables

    def load(self, flat):
        self.score = Oracle(self.tables[int(flat[0])]).score


def test_the_best_b_for_preferences_has_gained_most_on_the_first():
    """The second B likes the rejected answer more than the first does; the third likes the chosen one more."""
    tables = [{5: math.log(right), 6: math.log(wrong)} for right, wrong in ((0.5, 0.1), (0.6, 0.3), (0.4, 0.05))]
    candidates = [np.array([index], np.float32) for index in range(3)]
    recipe = RECIPE.model_copy(update={"loss": "dpo"})
    assert best_b(ManyOracles(*tables), [example(0, (5,), (6,))], recipe, candidates) == 2


def test_scores_that_are_no_numbers_mean_divergence():
    with pytest.raises(Diverged, match="lower lr"):
        log_probabilities(Oracle({5: math.nan}), [example(0, (5,), (6,))], RECIPE)
