"""Which tokens of prompts a step leaves out."""

import numpy as np
import pytest

from device_agent.training.trainer import KEPT, drop_tokens
from shared.recipe import BaseRef, Recipe
from shared.zo.encoding import Example, Row
from shared.zo.packing import step_texts

SHARE, SEED = 0.25, 3
BASE = BaseRef(name="tiny", sha256="0" * 64)
CHOICE = Recipe(base=BASE, loss="candidates", choices=2, answer_length=2, sequence_length=64)


def example(prompt=40, answers=((900,), (901, 902))):
    tokens = tuple(range(100, 100 + prompt))
    return Example(tuple(Row(tokens, answer) for answer in answers), 1, False)


def dropped(step=0, index=0, share=SHARE, **sizes):
    (thinned,), (positions,) = drop_tokens([(index, example(**sizes))], CHOICE, share, SEED, step)
    return thinned, positions


def test_a_share_of_the_tokens_is_left_out_and_the_first_the_last_and_the_answer_stay():
    shares = []
    for index in range(200):
        thinned, positions = dropped(index=index)
        (text,), (whole,) = (step_texts([each], CHOICE) for each in (thinned, example()))
        assert text == tuple(whole[position] for position in positions)
        prompt = thinned.correct_row.prompt
        assert prompt[0] == 100
        assert prompt[-KEPT:] == tuple(range(140 - KEPT, 140))
        assert thinned.correct_row.answer == (901, 902)
        shares.append(1 - (len(prompt) - 1 - KEPT) / (40 - 1 - KEPT))
    assert np.mean(shares) == pytest.approx(SHARE, abs=0.02)


def test_each_visit_leaves_out_other_tokens_and_the_same_ones_when_it_is_repeated():
    assert dropped(step=1)[0] == dropped(step=1)[0]
    assert len({dropped(step, index)[0].correct_row.prompt for step in range(3) for index in range(3)}) == 9


@pytest.mark.parametrize("prompt", [1, 2, KEPT, KEPT + 1])
def test_a_short_prompt_stays_whole(prompt):
    thinned, positions = dropped(share=0.99, prompt=prompt)
    assert thinned == example(prompt)
    assert positions.tolist() == list(range(prompt + 1))


def test_both_answers_of_a_preference_lose_the_same_tokens():
    pair = example()
    recipe = CHOICE.model_copy(update={"loss": "dpo"})
    (thinned,), kept = drop_tokens([(0, pair)], recipe, SHARE, SEED, 0)
    assert thinned.rows[0].prompt == thinned.rows[1].prompt != pair.rows[0].prompt
    assert [len(positions) for positions in kept] == [len(row.tokens) for row in thinned.rows]
