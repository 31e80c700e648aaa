"""The sensitivity of compiled private steps with exact gradients: what one example can change of what is released."""

import numpy as np
import pytest

from shared.privacy import NOISE_KEYS, NOISE_UNITS, UNITS
from shared.recipe import TARGETS
from shared.zo.noise import query_seeds
from tests.server.compiler import reference

EXAMPLES, SIGMA, CLIP = 3, 0.8, 0.3
CASES = {
    "int8": {"loss": "full", "precision": "int8"},
    "torch": {"loss": "candidates", "backend": "torch"},
    "directional": {"loss": "candidates", "estimator": "directional", "queries": 5},
    "loop": {"loss": "candidates", "estimator": "directional", "queries": 512, "rank": 32, "targets": TARGETS},
}


@pytest.fixture(params=CASES)
def program(request, programs, tiny):
    settings = {"estimator": "gradient", "effective_batch": EXAMPLES, "privacy": "clipped"} | CASES[request.param]
    return programs(tiny, **settings)


def totals(program, batch):
    """The totals before noise, of B as it is, which stays there."""
    recipe = program.manifest.recipe
    if recipe.estimator == "gradient":
        keys, carried = np.zeros((NOISE_KEYS, 2), np.int32), np.zeros(program.manifest.size, np.int32)
        rest = [0.1, np.inf, 0.0, CLIP, SIGMA, 0.0, keys, carried]
    else:
        rest = [query_seeds(1, 0, recipe.queries), 0.0, 0.0, CLIP, np.zeros(recipe.queries, np.float32)]
    return program.step(batch, *rest)[0].astype(np.int64)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.0, 0.1, 10.0])
def test_the_totals_are_sums_of_what_each_example_adds_by_itself(program, size):
    recipe = program.manifest.recipe
    before = program.load_some_b(size)
    bound = NOISE_UNITS / SIGMA if recipe.estimator == "gradient" else UNITS
    batch = reference.random_batch(np.random.default_rng(4), recipe, 96)
    alone = [totals(program, reference.select_rows(batch, [row, None, None])) for row in range(EXAMPLES)]
    assert all(0 < int(units @ units) <= bound**2 for units in alone)
    # Exactly: whoever else is in the step, and in which row, changes nothing of what an example adds.
    for rows in ([0, 1, 2], [2, 0, 1], [None, 1, 2], [1, None, 0], [2, 2, None]):
        expected = sum(alone[row] for row in rows if row is not None)
        np.testing.assert_array_equal(totals(program, reference.select_rows(batch, list(rows))), expected)
    assert not totals(program, reference.select_rows(batch, [None] * EXAMPLES)).any()
    np.testing.assert_array_equal(program("adapter")[0], before)
