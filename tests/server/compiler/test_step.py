"""A compiled program's steps against Algorithm 1 on the stock model, and its exact replay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.compiler.methods.noise import directions
from shared.program_inputs import TOKEN_DTYPE
from shared.recipe import Recipe
from shared.zo.noise import direction, query_seeds
from tests.server.compiler import reference
from tests.server.compiler.conftest import Program, Programs, token_batch

LR, EPS, STEPS = 0.05, 0.02, 5


def make_batch(rng: np.random.Generator, recipe: Recipe) -> reference.Batch:
    e, s, t, c = recipe.effective_batch, recipe.sequence_length, recipe.answer_length, recipe.choices
    choice_mask = np.ones((e, t, c), np.float32)
    choice_mask[0, :, -1] = 0  # a padded candidate
    mask = np.ones((e, t), np.float32)
    mask[1, 1:] = 0  # a shorter answer
    positions = np.sort(np.stack([rng.choice(s - 1, t, replace=False) for _ in range(e)]), axis=1)
    return reference.Batch(
        token_batch(rng, e, s), positions.astype(TOKEN_DTYPE), token_batch(rng, e, t, c), choice_mask, mask
    )


def call_step(program: Program, batch: reference.Batch, seeds: np.ndarray, lr: float = LR) -> list[np.ndarray]:
    full = program.manifest.recipe.loss == "full"
    labels = (batch.choices[..., 0],) if full else (batch.choices, batch.choice_mask)
    scalars = np.array([lr], np.float32), np.array([EPS], np.float32)
    return program("step", batch.tokens, batch.positions, *labels, batch.mask, seeds, *scalars)


CASES = [  # the first two have each q, noise, loss and backend somewhere
    (4, "rademacher", "full", "xnnpack"),
    (1, "gaussian", "candidates", "portable"),  # all seven targets
    pytest.param(1, "rademacher", "candidates", "portable", marks=pytest.mark.slow),
    pytest.param(4, "gaussian", "candidates", "xnnpack", marks=pytest.mark.slow),
    pytest.param(1, "rademacher", "full", "xnnpack", marks=pytest.mark.slow),
    pytest.param(1, "gaussian", "full", "xnnpack", marks=pytest.mark.slow),
    pytest.param(4, "gaussian", "full", "xnnpack", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("queries", "noise", "loss", "backend"), CASES)
def test_losses_and_b_follow_the_algorithm(
    programs: Programs, queries: int, noise: str, loss: str, backend: str
) -> None:
    program, base = programs(queries, noise, loss, backend)
    manifest, rng = program.manifest, np.random.default_rng(7)
    flat = np.zeros(manifest.size, np.float32)
    replayed = np.zeros(manifest.size, np.float32)
    trained = np.zeros(manifest.size, np.float32)
    for number in range(STEPS):
        batch = make_batch(rng, manifest.recipe)
        seeds = query_seeds(123, number, queries)
        losses, coefficients = call_step(program, batch, seeds)
        expected, _, flat = reference.step(base.model, manifest.recipe, manifest.shape, flat, batch, seeds, LR, EPS)
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        (trained,) = program("adapter")
        for coefficient, seed in zip(coefficients, seeds, strict=True):
            replayed = replayed - coefficient * direction(noise, (int(seed[0]), int(seed[1])), manifest.size)
    np.testing.assert_allclose(trained, flat, atol=2e-3 * np.abs(flat).max())
    if noise == "rademacher":
        assert np.array_equal(trained, replayed)
    else:
        np.testing.assert_allclose(trained, replayed, atol=1e-5 * np.abs(replayed).max())


@pytest.mark.parametrize(("queries", "noise", "loss", "backend"), CASES[:2])
def test_replay_restores_b_bit_for_bit(programs: Programs, queries: int, noise: str, loss: str, backend: str) -> None:
    program, _ = programs(queries, noise, loss, backend)
    rng = np.random.default_rng(3)
    ledger = []
    for number in range(3):
        seeds = query_seeds(5, number, queries)
        ledger.append((seeds, call_step(program, make_batch(rng, program.manifest.recipe), seeds)[1]))
    (trained,) = program("adapter")
    assert np.abs(trained).max() > 0
    program("load", np.zeros_like(trained))
    for seeds, coefficients in ledger:
        program("replay", seeds, coefficients)
    assert np.array_equal(program("adapter")[0], trained)


def test_a_learning_rate_of_zero_leaves_b_as_it_is(programs: Programs) -> None:
    program, _ = programs(4, "rademacher", "full", "xnnpack")
    rng = np.random.default_rng(4)
    b = rng.standard_normal(program.manifest.size).astype(np.float32)
    program("load", b)
    call_step(program, make_batch(rng, program.manifest.recipe), query_seeds(1, 0, 4), lr=0.0)
    assert np.array_equal(program("adapter")[0], b)


@pytest.mark.parametrize(
    ("queries", "noise", "loss", "backend"),
    [*CASES[:2], pytest.param(1, "rademacher", "full", "xnnpack", marks=pytest.mark.slow)],
)
def test_score_is_the_stock_models_log_softmax(
    programs: Programs, queries: int, noise: str, loss: str, backend: str
) -> None:
    program, base = programs(queries, noise, loss, backend)
    recipe, shape, rng = program.manifest.recipe, program.manifest.shape, np.random.default_rng(5)
    rows, t, c = recipe.score_rows, recipe.answer_length, recipe.choices
    b = 0.1 * rng.standard_normal(program.manifest.size).astype(np.float32)
    tokens, choices = token_batch(rng, rows, recipe.sequence_length), token_batch(rng, rows, t, c)
    positions = rng.integers(0, recipe.sequence_length, (rows, t)).astype(TOKEN_DTYPE)
    program("load", b)
    (scores,) = program("score", tokens, positions, choices)
    batch = reference.Batch(tokens, positions, choices, np.ones((rows, t, c), np.float32), np.ones((rows, t)))
    logits = reference.answer_logits(base.model, recipe, shape, b, batch)
    expected = torch.log_softmax(logits, -1).gather(2, torch.from_numpy(choices.astype(np.int64)))
    np.testing.assert_allclose(scores, expected.numpy(), atol=1e-4)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_graph_noise_is_the_reference_noise(size: int) -> None:
    seeds = query_seeds(99, 3, 3)
    for noise, tolerance in (("rademacher", 0.0), ("gaussian", 2e-6)):
        ours = directions(noise, torch.from_numpy(seeds), size).numpy()
        expected = np.stack([direction(noise, (int(a), int(b)), size) for a, b in seeds])
        np.testing.assert_allclose(ours, expected, rtol=0, atol=tolerance)
