"""Programs that compute logits of a few positions at once, against those that compute all together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.compiler import compile_program
from shared import program as interface
from shared.program import logits_part
from shared.program_inputs import TOKEN_DTYPE
from tests.server.compiler import reference
from tests.server.compiler.conftest import VOCABULARY, Program, make_tiny


@pytest.mark.parametrize(
    ("rows", "tokens", "vocabulary", "part"),
    [
        (8, 1, 49152, (8, 1)),
        (8, 64, 49152, (1, 32)),
        (32, 16, 49152, (2, 16)),
        (8, 95, 49152, (2, 19)),
        (8, 127, 151936, (8, 1)),  # a prime number of tokens
        (4, 4, 10_000_000, (1, 1)),
    ],
)
def test_parts_are_divisors_that_fit(rows: int, tokens: int, vocabulary: int, part: tuple[int, int]) -> None:
    assert logits_part(rows, tokens, vocabulary) == part


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"estimator": "gradient", "optimizer": "momentum", "queries": 1},
        {"estimator": "gradient", "optimizer": "momentum", "queries": 1, "precision": "int8"},
        {"estimator": "replay", "queries": 2, "precision": "int8"},
    ],
    ids=["gradient", "gradient int8", "replay int8"],
)
def test_parts_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    base = make_tiny(tmp_path / "base", seed=5, hidden_size=64, tie_word_embeddings=True)
    recipe = base.recipe(loss="full", answer_length=4, effective_batch=4, **settings)
    batch = reference.random_batch(np.random.default_rng(7), recipe, VOCABULARY)
    draw, r, t = np.random.default_rng(8), recipe.score_rows, recipe.answer_length
    shapes = ((VOCABULARY, (r, recipe.sequence_length)), (recipe.sequence_length, (r, t)), (VOCABULARY, (r, t, 3)))
    inputs = [draw.integers(0, bound, shape).astype(TOKEN_DTYPE) for bound, shape in shapes]
    outputs = []
    for name, most in (("whole", interface.MAX_LOGITS), ("parts", 2 * 2 * VOCABULARY)):
        monkeypatch.setattr(interface, "MAX_LOGITS", most)
        manifest = compile_program(recipe, str(base.directory), tmp_path / name, inference=False)
        program = Program(tmp_path / name, manifest)
        program.load_some_b()
        rest: tuple[Any, ...] = (0.01, np.inf, 0.0)
        if recipe.estimator == "replay":
            rest = (np.arange(4, dtype=np.int32).reshape(2, 2), 0.01, 0.05)
        losses, _ = program.step(batch, *rest)
        scores = program("score", *inputs)
        outputs.append((losses, program("adapter")[0], scores[0]))
    for whole, parts in zip(*outputs, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=2e-5, atol=2e-6)
