"""Which examples a step sees."""

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent.order import ExampleOrder


@given(seed=st.integers(0, 2**53 - 1), size=st.integers(1, 40), batch=st.integers(1, 12))
def test_every_epoch_visits_every_example_once(seed, size, batch):
    order = ExampleOrder(seed, size, batch)
    visited = list(chain.from_iterable(order.indices(step) for step in range(3 * size)))
    for epoch in range(3 * size * batch // size):
        assert sorted(visited[epoch * size : (epoch + 1) * size]) == list(range(size))


@given(step=st.integers(0, 10**6))
def test_a_step_alone_decides_its_batch(step):
    assert ExampleOrder(3, 10, 4).indices(step) == ExampleOrder(3, 10, 4).indices(step)
    assert len(ExampleOrder(3, 10, 4).indices(step)) == 4


@pytest.mark.parametrize("other", [ExampleOrder(4, 50, 50), ExampleOrder(3, 50, 25)])
def test_seeds_and_batch_sizes_matter(other):
    assert other.indices(1) != ExampleOrder(3, 50, 50).indices(1)


def test_epochs_are_shuffled_differently():
    order = ExampleOrder(0, 50, 50)
    assert order.indices(0) != order.indices(1)
