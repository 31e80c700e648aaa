import math
from typing import get_args

import pytest
from pydantic import ValidationError

from shared.job import MOVES, JobRequest, JobState, Progress
from shared.recipe import DEFAULT_EPS, Precision, RecipeSettings
from shared.training_settings import TrainingSettings


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


@pytest.mark.parametrize("precision", get_args(Precision))
def test_eps_is_the_given_one_or_the_precisions_own(precision):
    settings = RecipeSettings(precision=precision)
    assert TrainingSettings().eps_for(settings) == DEFAULT_EPS[precision]
    assert TrainingSettings(eps=0.3).eps_for(settings) == 0.3


def test_progress_on_one_line():
    everything = Progress(
        phase="training",
        step=3,
        steps=10,
        loss=0.51234,
        examples_per_second=3.21,
        seconds_left=65.4,
        rss_bytes=123_000_000,
        accuracy=0.7,
        best_accuracy=0.75,
    )
    assert everything.line() == (
        "training  step 3/10  loss 0.512  3.2 samples/s  1:05 left  123 MB  validation 70.0%  best 75.0%"
    )
    assert Progress(phase="loading").line() == "loading"


def test_a_pull_past_the_start_is_refused_and_none_leaves_no_trace():
    assert "proximal" not in TrainingSettings().model_dump_json()
    assert TrainingSettings(lr=0.5, proximal=2).model_dump()["proximal"] == 2
    with pytest.raises(ValidationError, match=r"overshoots the start at lr 0\.5"):
        TrainingSettings(lr=0.5, proximal=2.1)


def test_a_private_job_cannot_end_by_what_it_measures():
    body = {"base": "b", "user": "u", "adapter": "a", "task": "sst2", "dataset": "d", "training": {"patience": 2}}
    assert JobRequest.model_validate(body).training.patience == 2
    body["privacy"] = {"clip": 1, "noise_multiplier": 1, "sampling_rate": 0.1}
    with pytest.raises(ValidationError, match="cannot end early"):
        JobRequest.model_validate(body)
