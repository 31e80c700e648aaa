"""Which examples a step sees."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.training.data import BatchSampler
from shared.zo.example_order import alternating

ANSWERS = (0, 1) * 25


@given(
    seed=st.integers(0, 2**53 - 1),
    answers=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    batch=st.integers(1, 12),
)
def test_every_epoch_visits_every_example_once(seed, answers, batch):
    order, size = BatchSampler(seed, tuple(answers), batch), len(answers)
    visited = list(chain.from_iterable(order.indices(step) for step in range(3 * size)))
    for epoch in range(3 * batch):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(step=st.integers(0, 10**6))
def test_a_step_alone_decides_its_batch(step):
    assert BatchSampler(3, ANSWERS[:10], 4).indices(step) == BatchSampler(3, ANSWERS[:10], 4).indices(step)
    assert len(BatchSampler(3, ANSWERS[:10], 4).indices(step)) == 4


@given(seed=st.integers(0, 1000), step=st.integers(0, 100))
def test_a_batch_has_each_answer_in_proportion(seed, step):
    even = BatchSampler(seed, ANSWERS, 4)
    assert sorted(ANSWERS[index] for index in even.indices(step)) == [0, 0, 1, 1]
    answers = (0,) * 30 + (1,) * 10
    rare = [answers[index] for index in BatchSampler(seed, answers, 8).indices(step)]
    assert rare.count(1) == 2


@pytest.mark.parametrize("other", [BatchSampler(4, ANSWERS, 50), BatchSampler(3, ANSWERS, 25)])
def test_seeds_and_batch_sizes_matter(other):
    assert other.indices(1) != BatchSampler(3, ANSWERS, 50).indices(1)


@given(
    seed=st.integers(0, 2**53 - 1),
    answers=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    batch=st.integers(1, 30),
    steps=st.lists(st.integers(0, 5), min_size=1, max_size=4),
)
def test_batches_are_cut_from_the_epochs_laid_end_to_end_in_whatever_order_steps_are_asked_for(
    seed, answers, batch, steps
):
    order, last = BatchSampler(seed, tuple(answers), batch), (max(steps) + 1) * batch
    laid = list(chain.from_iterable(alternating(seed, epoch, answers) for epoch in range(1 + last // len(answers))))
    for step in steps:
        assert order.indices(step) == laid[step * batch : (step + 1) * batch]


def test_epochs_are_shuffled_differently():
    order = BatchSampler(0, ANSWERS, 50)
    assert order.indices(0) != order.indices(1)
