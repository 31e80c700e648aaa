"""Which examples a step sees."""

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from device_agent.training.data import BatchSampler
from shared.zo.example_order import alternating

ANSWERS = (0, 1) * 25


@given(seed=st.integers(0, 1000), step=st.integers(0, 100))
def test_a_batch_has_each_answer_in_proportion(seed, step):
    even = BatchSampler(seed, ANSWERS, 4)
    assert sorted(ANSWERS[index] for index in even.indices(step)) == [0, 0, 1, 1]
    answers = (0,) * 30 + (1,) * 10
    rare = [answers[index] for index in BatchSampler(seed, answers, 8).indices(step)]
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
    order, last = BatchSampler(seed, tuple(answers), batch), (max(steps) + 1) * batch
    laid = list(chain.from_iterable(alternating(seed, epoch, answers) for epoch in range(1 + last // len(answers))))
    for step in steps:
        assert order.indices(step) == laid[step * batch : (step + 1) * batch]
