"""The sensitivity of compiled private steps with exact gradients: what one example can change of what is released."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.privacy import NOISE_KEYS, NOISE_UNITS, UNITS
from shared.zo.noise import query_seeds
from tests.programs import shared_store
from tests.server.compiler import reference
from tests.server.compiler.conftest import Program, TinyBase
from tests.server.compiler.test_private_step import AnyProgram, TorchProgram, chosen, inputs, load

EXAMPLES, QUERIES, SIGMA, CLIP = 3, 5, 0.8, 0.3
CASES = {
    "fp32": {"loss": "full"},
    "int8": {"loss": "candidates", "precision": "int8", "layers": "last:1"},
    "portable": {"loss": "full", "backend": "portable"},
    "torch": {"loss": "candidates", "backend": "torch"},
    "directional": {"loss": "candidates", "estimator": "directional", "queries": QUERIES},
    "directional torch": {"loss": "candidates", "estimator": "directional", "queries": QUERIES, "backend": "torch"},
}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def program(request: pytest.FixtureRequest, tiny: TinyBase, tmp_path_factory: pytest.TempPathFactory) -> AnyProgram:
    settings = {"estimator": "gradient", "effective_batch": EXAMPLES, "privacy": "clipped"} | CASES[request.param]
    recipe = tiny.recipe(**settings)
    directory: Path = tmp_path_factory.mktemp("private") / request.param
    manifest = shared_store().put(recipe, tiny.directory, directory, False)
    return (TorchProgram if recipe.backend == "torch" else Program)(directory, manifest)


def one(value: float) -> np.ndarray:
    return np.array([value], np.float32)


def totals(program: AnyProgram, batch: reference.Batch) -> np.ndarray:
    """The totals before noise, of B as it is, which stays there."""
    recipe, clip = program.manifest.recipe, one(CLIP)
    if recipe.estimator == "gradient":
        keys, carried = np.zeros((NOISE_KEYS, 2), np.int32), np.zeros(program.manifest.size, np.int32)
        rest = [one(0.1), one(np.inf), one(0.0), clip, one(SIGMA), one(0.0), keys, carried]
    else:
        rest = [query_seeds(1, 0, QUERIES), one(0.0), one(0.0), clip, np.zeros(QUERIES, np.float32)]
    found, _ = program("step", batch.tokens, *inputs(program, batch), *rest)
    return found.astype(np.int64)


@pytest.mark.parametrize("size", [0.0, 0.1, 10.0])
def test_the_totals_are_sums_of_what_each_example_adds_by_itself(program: AnyProgram, size: float) -> None:
    recipe = program.manifest.recipe
    load(program, 4, size)
    (before,) = program("adapter")
    bound = NOISE_UNITS / SIGMA if recipe.estimator == "gradient" else UNITS
    batch = reference.random_batch(np.random.default_rng(4), recipe, 96)
    alone = [totals(program, chosen(batch, [row, None, None])) for row in range(EXAMPLES)]
    assert all(0 < int(units @ units) <= bound**2 for units in alone)
    # Exactly: whoever else is in the step, and in which row, changes nothing of what an example adds.
    for rows in ([0, 1, 2], [2, 0, 1], [None, 1, 2], [1, None, 0], [2, 2, None]):
        expected = sum(alone[row] for row in rows if row is not None)
        np.testing.assert_array_equal(totals(program, chosen(batch, list(rows))), expected)
    assert not totals(program, chosen(batch, [None] * EXAMPLES)).any()
    np.testing.assert_array_equal(program("adapter")[0], before)
