import math
from typing import get_args

import pytest
from pydantic import ValidationError

from shared.recipe import DEFAULT_EPS, Precision, RecipeSettings
from shared.training_settings import TrainingSettings


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
def test_eps_defaults_to_the_precisions_value(precision):
    settings = RecipeSettings(precision=precision)
    assert TrainingSettings().eps_for(settings) == DEFAULT_EPS[precision]
    assert TrainingSettings(eps=0.3).eps_for(settings) == 0.3


def test_a_pull_past_the_start_is_rejected_and_0_is_omitted():
    assert "proximal" not in TrainingSettings().model_dump_json()
    assert TrainingSettings(lr=0.5, proximal=2).model_dump()["proximal"] == 2
    with pytest.raises(ValidationError, match=r"overshoots the start at lr 0\.5"):
        TrainingSettings(lr=0.5, proximal=2.1)
