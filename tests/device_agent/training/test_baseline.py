"""The baselines against counts by hand, and against a task that words decide."""

import numpy as np
import pytest

from device_agent.training.baseline import measure_baseline
from shared.zo.encoding import Example

DECIDING = ((5, 6), (7,), (8, 9))  # tokens of each answer


def records(count, seed):
    """Prompts of random tokens, with the tokens of their answer in between and a cue at the end."""
    random = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        answer = int(random.integers(3))
        filler = random.integers(20, 60, 12).tolist()
        at = int(random.integers(12))
        prompt = (*filler[:at], *DECIDING[answer], *filler[at:], 1, 2)
        examples.append(Example((), answer, truncated=False, prompt=prompt))
    return examples


def test_words_that_decide_are_learned():
    baseline = measure_baseline(records(200, 0), records(100, 1))
    assert baseline.ngrams > 0.95
    assert baseline.majority < 0.6
    assert measure_baseline(records(200, 0), records(100, 1)) == baseline


def test_without_any_text_both_are_the_most_frequent_answer():
    train = [Example((), answer, False) for answer in (1, 1, 1, 0, 2)]
    measured = [Example((), answer, False) for answer in (1, 0, 0, 1)]
    baseline = measure_baseline(train, measured)
    assert baseline.majority == 0.5
    assert baseline.ngrams == pytest.approx(0.5)
