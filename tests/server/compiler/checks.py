"""Checks of compiled programs against the reference, shared by several test files."""

import numpy as np

from shared.program_inputs import TOKEN_DTYPE
from shared.zo.noise import query_seeds
from tests.server.compiler import reference
from tests.server.compiler.conftest import token_batch


def check_steps(program, model, batches, lr, eps, tolerance=0.002):
    """Each step's losses and change of B are those of Algorithm 1 from the B that the program has.

    tolerance: of B, relative to the step's largest change.
    """
    manifest = program.manifest
    (flat,) = program("adapter")
    for number, batch in enumerate(batches):
        seeds = query_seeds(123, number, manifest.recipe.queries)
        losses, _ = program.step(batch, seeds, lr, eps)
        expected, _, after = reference.step(model, manifest.recipe, manifest.shape, flat, batch, seeds, lr, eps)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        largest_change = np.abs(after - flat).max()
        (flat,) = program("adapter")
        np.testing.assert_allclose(flat, after, rtol=0, atol=tolerance * largest_change)


def check_scores(program, model, lengths, atol=0.0001):
    """`score` at some B gives the model's log-probabilities for random rows of each length."""
    recipe, shape, rng = program.manifest.recipe, program.manifest.shape, np.random.default_rng(5)
    rows, t, c = recipe.score_rows, recipe.answer_length, recipe.choices
    b = program.load_some_b()
    for length in lengths:
        tokens = token_batch(rng, rows, length, vocabulary=shape.vocabulary)
        choices = token_batch(rng, rows, t, c, vocabulary=shape.vocabulary)
        positions = rng.integers(0, length, (rows, t)).astype(TOKEN_DTYPE)
        (scores,) = program("score", tokens, positions, choices)
        expected = reference.scores(model, recipe, shape, b, tokens, positions, choices)
        np.testing.assert_allclose(scores, expected, rtol=0, atol=atol)


def check_split(program, batches, rests):
    """`prefix` and `suffix` are `step` to the bit, with states that were cached from other batches."""
    e = program.manifest.recipe.effective_batch
    tokens = np.concatenate([batch.tokens for batch in batches])
    cached = np.empty((*tokens.shape, program.manifest.shape.hidden), np.float32)
    order = np.random.default_rng(8).permutation(len(tokens))  # every example once, in company that no step has
    for at in range(0, len(tokens), e):
        cached[order[at : at + e]] = program("prefix", tokens[order[at : at + e]])[0]

    def run(split):
        program.load_some_b()
        outputs = []
        for number, (batch, rest) in enumerate(zip(batches, rests, strict=True)):
            hidden = cached[number * e : (number + 1) * e]
            outputs += program.suffix(hidden, batch, *rest) if split else program.step(batch, *rest)
            outputs += program("state" if "state" in program.manifest.methods else "adapter")
        return outputs

    for whole, split in zip(run(split=False), run(split=True), strict=True):
        np.testing.assert_array_equal(split, whole)
