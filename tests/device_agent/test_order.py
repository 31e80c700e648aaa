"""Which examples a step sees."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.order import ExampleOrder

ANSWERS = (0, 1) * 25


@given(
    seed=st.integers(0, 2**53 - 1),
    answers=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    batch=st.integers(1, 12),
)
def test_every_epoch_visits_every_example_once(seed, answers, batch):
    order, size = ExampleOrder(seed, tuple(answers), batch), len(answers)
    visited = list(chain.from_iterable(order.indices(step) for step in range(3 * size)))
    for epoch in range(3 * batch):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(step=st.integers(0, 10**6))
def test_a_step_alone_decides_its_batch(step):
    assert ExampleOrder(3, ANSWERS[:10], 4).indices(step) == ExampleOrder(3, ANSWERS[:10], 4).indices(step)
    assert len(ExampleOrder(3, ANSWERS[:10], 4).indices(step)) == 4


@given(seed=st.integers(0, 1000), step=st.integers(0, 100))
def test_a_batch_has_each_answer_in_proportion(seed, step):
    even = ExampleOrder(seed, ANSWERS, 4)
    assert sorted(ANSWERS[index] for index in even.indices(step)) == [0, 0, 1, 1]
    answers = (0,) * 30 + (1,) * 10
    rare = [answers[index] for index in ExampleOrder(seed, answers, 8).indices(step)]
    assert rare.count(1) == 2


@pytest.mark.parametrize("other", [ExampleOrder(4, ANSWERS, 50), ExampleOrder(3, ANSWERS, 25)])
def test_seeds_and_batch_sizes_matter(other):
    assert other.indices(1) != ExampleOrder(3, ANSWERS, 50).indices(1)


def test_epochs_are_shuffled_differently():
    order = ExampleOrder(0, ANSWERS, 50)
    assert order.indices(0) != order.indices(1)
