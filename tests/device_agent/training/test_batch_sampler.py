"""Which examples a step sees."""

from collections import Counter
from itertools import chain

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from device_agent.training.batch_sampler import BatchSampler
from shared.zo.example_order import alternating, grouped_by_length

ANSWERS = (0, 1) * 25


def lengths(answers):
    return tuple(index * 37 % 101 for index in range(len(answers)))


def epoch_order(seed, epoch, answers, batch):
    return grouped_by_length(alternating(seed, epoch, answers), answers, lengths(answers), batch, seed, epoch)


@given(seed=st.integers(0, 1000), step=st.integers(0, 100))
def test_a_batch_has_each_answer_in_proportion(seed, step):
    even = BatchSampler(seed, ANSWERS, lengths(ANSWERS), 4)
    assert sorted(ANSWERS[index] for index in even.indices(step)) == [0, 0, 1, 1]
    answers = (0,) * 30 + (1,) * 10
    rare = [answers[index] for index in BatchSampler(seed, answers, lengths(answers), 8).indices(step)]
    assert rare.count(1) == 2


@given(
    seed=st.integers(0, 2**53 - 1),
    answers=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    batch=st.integers(1, 30),
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_batches_are_cut_from_the_epochs_laid_end_to_end_in_whatever_order_steps_are_asked_for(
    seed, answers, batch, steps
):
    order, last = BatchSampler(seed, tuple(answers), lengths(answers), batch), (max(steps) + 1) * batch
    laid = chain.from_iterable(epoch_order(seed, epoch, answers, batch) for epoch in range(1 + last // len(answers)))
    visits = list(laid)
    for step in steps:
        assert order.indices(step) == visits[step * batch : (step + 1) * batch]


@given(
    seed=st.integers(0, 1000),
    epoch=st.integers(0, 3),
    answers=st.lists(st.integers(0, 2), min_size=1, max_size=200),
    batch=st.integers(1, 9),
)
def test_examples_of_similar_length_come_together_in_batches_with_the_answers_that_they_had(
    seed, epoch, answers, batch
):
    def batches(indices):
        begin = -epoch * len(answers) % batch
        return Counter(
            tuple(sorted(answers[index] for index in indices[at : at + batch]))
            for at in range(begin, len(indices), batch)
        )

    order, grouped = alternating(seed, epoch, answers), epoch_order(seed, epoch, answers, batch)
    assert sorted(grouped) == sorted(order)
    assert batches(grouped) == batches(order)


def test_the_longest_examples_of_batches_are_much_shorter_than_of_shuffled_ones():
    rng = np.random.default_rng(0)
    own = tuple(rng.lognormal(3, 0.6, 640).astype(int).tolist())
    sampler = BatchSampler(0, (0, 1, 2, 3) * 160, own, 8)
    longest = [max(own[index] for index in sampler.indices(step)) for step in range(160)]
    shuffled = np.random.default_rng(1).permutation(own).reshape(-1, 8).max(1)
    assert np.mean(longest) < 0.7 * shuffled.mean()
