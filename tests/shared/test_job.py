import math

import pytest

from shared.job import MOVES, JobState, TrainingSettings


def test_final_states_are_those_without_moves():
    assert {state for state in JobState if state.final} == {
        JobState.SUCCEEDED,
        JobState.FAILED,
        JobState.CANCELLED,
    }
    assert set(MOVES) == set(JobState)


def test_every_state_but_the_first_can_be_reached_and_every_open_one_cancelled():
    reached = set().union(*MOVES.values())
    assert reached | {JobState.QUEUED} == set(JobState)
    assert all(JobState.CANCELLED in moves for state, moves in MOVES.items() if not state.final)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1]),
        ("linear", [1, 0.75, 0.5, 0.25]),
        ("cosine", [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]),
    ],
)
def test_schedules(schedule, expected):
    settings = TrainingSettings(steps=4, lr=1, schedule=schedule)
    assert [settings.lr_at(step) for step in range(4)] == pytest.approx(expected)


def test_warmup_rises_to_the_first_full_step():
    settings = TrainingSettings(steps=10, lr=1, schedule="linear", warmup_steps=3)
    assert [settings.lr_at(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert settings.lr_at(9) == pytest.approx(1 / 7)
