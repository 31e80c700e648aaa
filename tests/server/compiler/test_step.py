"""A compiled program's steps against Algorithm 1 on the stock model, at every length up to S, and its exact replay."""

import numpy as np
import pytest
import torch

from server.compiler.methods.noise import directions
from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import TARGETS
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.checks import check_scores, check_steps
from tests.server.compiler.conftest import VOCABULARY, token_batch

LR, EPS, STEPS = 0.05, 0.02, 5
LENGTHS = (12, 5, 9, 2, 12, 2, 7)  # up and down, between the shortest and S = 12
CASES = [  # test_private_step.py has xnnpack with the other noise and loss
    (4, "rademacher", "full", "xnnpack"),
    pytest.param((1, "gaussian", "candidates", "portable"), marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES, ids=lambda values: "-".join(map(str, values)))
def case(request, programs, tiny, tiny_tied):
    """A program, and its base: tied for the candidates loss. q = 1 adapts all seven linear layers."""
    queries, noise, loss, backend = request.param
    base = tiny_tied if loss == "candidates" else tiny
    targets = TARGETS if queries == 1 else ("q_proj", "v_proj")
    return programs(base, queries=queries, noise=noise, loss=loss, backend=backend, targets=targets), base


def test_losses_and_b_follow_the_algorithm(case):
    program, base = case
    rng = np.random.default_rng(7)
    check_steps(
        program,
        base.model,
        [reference.random_batch(rng, program.manifest.recipe, VOCABULARY) for _ in range(STEPS)],
        LR,
        EPS,
    )


def test_replay_restores_b_bit_for_bit(case):
    program, _ = case
    recipe, size, rng = program.manifest.recipe, program.manifest.size, np.random.default_rng(3)
    ledger = []
    for number in range(STEPS):
        seeds = query_seeds(5, number, recipe.queries)
        ledger.append((seeds, program.step(reference.random_batch(rng, recipe, VOCABULARY), seeds, LR, EPS)[1]))
    (trained_b,) = program("adapter")
    assert np.abs(trained_b).max() > 0
    program("load", np.zeros(size, np.float32))
    by_numpy = np.zeros(size, np.float32)
    for seeds, coefficients in ledger:
        program("replay", seeds, coefficients)
        for coefficient, (first, second) in zip(coefficients, seeds.tolist(), strict=True):
            by_numpy = by_numpy - coefficient * direction(recipe.noise, (first, second), size)
    assert np.array_equal(program("adapter")[0], trained_b)
    if recipe.noise == "rademacher":
        assert np.array_equal(trained_b, by_numpy)
    else:
        np.testing.assert_allclose(trained_b, by_numpy, atol=1e-5 * np.abs(by_numpy).max())


def test_score_is_the_stock_models_log_softmax(case):
    program, base = case
    check_scores(program, base.model, LENGTHS)


def batch_of(rng, program, length):
    """Random examples of `length` tokens, T answers each, one of them anywhere."""
    recipe = program.manifest.recipe
    shape = (recipe.effective_batch, recipe.answer_length, recipe.choices)
    return reference.Batch(
        token_batch(rng, shape[0], length),
        rng.integers(0, length, shape[:2]).astype(TOKEN_DTYPE),
        token_batch(rng, *shape),
        np.ones(shape, np.float32),
        np.ones(shape[:2], np.float32),
    )


def test_steps_of_changing_length_follow_the_algorithm(case):
    program, base = case
    assert program.manifest.dynamic_length
    rng = np.random.default_rng(7)
    check_steps(program, base.model, [batch_of(rng, program, length) for length in LENGTHS], LR, EPS)


def test_more_than_s_tokens_are_an_error_and_change_nothing(plain):
    rng, rows = np.random.default_rng(6), plain.manifest.score_rows
    b = plain.load_some_b(1.0)
    good, seeds = batch_of(rng, plain, 12), query_seeds(1, 0, 4)
    before = plain.step(good, seeds, 0.0, EPS)[0]
    with pytest.raises(RuntimeError, match="set_inputs"):
        plain.step(batch_of(rng, plain, 13), seeds, LR, EPS)
    with pytest.raises(RuntimeError, match="set_inputs"):
        plain("score", token_batch(rng, rows, 13), *(np.zeros((rows, 2, *more), TOKEN_DTYPE) for more in ((), (3,))))
    np.testing.assert_array_equal(plain("adapter")[0], b)
    np.testing.assert_array_equal(plain.step(good, seeds, 0.0, EPS)[0], before)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_graph_noise_is_the_reference_noise(size):
    seeds = query_seeds(99, 3, 3)
    for noise, tolerance in (("rademacher", 0.0), ("gaussian", 2e-6)):
        ours = directions(noise, torch.from_numpy(seeds), size).numpy()
        expected = np.stack([direction(noise, (int(a), int(b)), size) for a, b in seeds])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
