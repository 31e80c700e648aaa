"""One program at every length up to S: what the stock model gives there, what padding changes, what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.program_inputs import TOKEN_DTYPE
from shared.zo.noise import query_seeds
from tests.server.compiler import reference
from tests.server.compiler.conftest import Program, Programs, TinyBase, token_batch

LR, EPS = 0.05, 0.02
LENGTHS = (12, 5, 9, 2, 12, 2, 7)  # up and down, between the shortest and S = 12


@pytest.fixture
def program(programs: Programs) -> tuple[Program, TinyBase]:
    return programs(4, "rademacher", "full", "xnnpack")


def batch_of(rng: np.random.Generator, program: Program, length: int) -> reference.Batch:
    """Random examples of `length` tokens, T answers each, one of them anywhere."""
    recipe = program.manifest.recipe
    e, t = recipe.effective_batch, recipe.answer_length
    assert t > 1
    shape = (e, t, recipe.choices)
    return reference.Batch(
        token_batch(rng, e, length),
        rng.integers(0, length, (e, t)).astype(TOKEN_DTYPE),
        token_batch(rng, *shape),
        np.ones(shape, np.float32),
        np.ones((e, t), np.float32),
    )


def padded(rng: np.random.Generator, batch: reference.Batch, length: int) -> reference.Batch:
    """The batch with any tokens after its own."""
    rows, own = batch.tokens.shape
    return replace(batch, tokens=np.concatenate((batch.tokens, token_batch(rng, rows, length - own)), axis=1))


def test_steps_of_changing_length_follow_the_algorithm(program: tuple[Program, TinyBase]) -> None:
    compiled, base = program
    manifest, rng = compiled.manifest, np.random.default_rng(7)
    assert manifest.dynamic_length
    flat = np.zeros(manifest.size, np.float32)
    for number, length in enumerate(LENGTHS):
        batch, seeds = batch_of(rng, compiled, length), query_seeds(123, number, 4)
        losses, _ = compiled.step(batch, seeds, LR, EPS)
        expected, _, after = reference.step(base.model, manifest.recipe, manifest.shape, flat, batch, seeds, LR, EPS)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        moved = np.abs(after - flat).max()
        (flat,) = compiled("adapter")
        np.testing.assert_allclose(flat, after, rtol=0, atol=2e-3 * moved)


def test_padding_changes_nothing(program: tuple[Program, TinyBase]) -> None:
    compiled, _ = program
    rng = np.random.default_rng(8)
    b = (0.1 * rng.standard_normal(compiled.manifest.size)).astype(np.float32)
    for length in (2, 5, 11):
        short, seeds = batch_of(rng, compiled, length), query_seeds(5, length, 4)
        results = []
        for batch in (short, padded(rng, short, 12), padded(rng, short, length + 1)):
            compiled("load", b)
            results.append([*compiled.step(batch, seeds, LR, EPS), *compiled("adapter")])
        for losses, coefficients, trained in results[1:]:
            np.testing.assert_allclose(losses, results[0][0], rtol=1e-6)
            np.testing.assert_allclose(coefficients, results[0][1], rtol=0, atol=LR / 4 * 1e-5 / EPS)
            np.testing.assert_allclose(trained, results[0][2], rtol=0, atol=LR * 1e-5 / EPS)


def test_scores_of_changing_length_are_the_stock_models(program: tuple[Program, TinyBase]) -> None:
    compiled, base = program
    recipe, shape, rng = compiled.manifest.recipe, compiled.manifest.shape, np.random.default_rng(5)
    rows, t, c = recipe.score_rows, recipe.answer_length, recipe.choices
    b = (0.1 * rng.standard_normal(compiled.manifest.size)).astype(np.float32)
    compiled("load", b)
    for length in LENGTHS:
        tokens, choices = token_batch(rng, rows, length), token_batch(rng, rows, t, c)
        positions = rng.integers(0, length, (rows, t)).astype(TOKEN_DTYPE)
        (scores,) = compiled("score", tokens, positions, choices)
        batch = reference.Batch(tokens, positions, choices, np.ones((rows, t, c), np.float32), np.ones((rows, t)))
        logits = reference.answer_logits(base.model, recipe, shape, b, batch)
        expected = torch.log_softmax(logits, -1).gather(2, torch.from_numpy(choices))
        np.testing.assert_allclose(scores, expected.numpy(), rtol=0, atol=1e-4)


def test_more_than_s_tokens_are_an_error_and_change_nothing(program: tuple[Program, TinyBase]) -> None:
    compiled, _ = program
    rng, rows = np.random.default_rng(6), compiled.manifest.score_rows
    b = rng.standard_normal(compiled.manifest.size).astype(np.float32)
    compiled("load", b)
    good, seeds = batch_of(rng, compiled, 12), query_seeds(1, 0, 4)
    before = compiled.step(good, seeds, 0.0, EPS)[0]
    with pytest.raises(RuntimeError, match="set_inputs"):
        compiled.step(batch_of(rng, compiled, 13), seeds, LR, EPS)
    with pytest.raises(RuntimeError, match="set_inputs"):
        compiled("score", token_batch(rng, rows, 13), *(np.zeros((rows, 2, *more), TOKEN_DTYPE) for more in ((), (3,))))
    np.testing.assert_array_equal(compiled("adapter")[0], b)
    np.testing.assert_array_equal(compiled.step(good, seeds, 0.0, EPS)[0], before)
