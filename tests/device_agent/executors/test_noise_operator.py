"""Programs that call the paper's noise operator, on the runner that has its kernel, against NumPy's directions."""

from contextlib import closing

import numpy as np
import pytest

from shared.zo.noise import gaussian, query_seeds
from tests.device_agent.native import opened_by_runner

EPS = 0.01


@pytest.fixture(scope="module")
def operator(compile_tiny):
    return compile_tiny("operator", estimator="stored", noise="operator")


@pytest.mark.slow
def test_every_querys_direction_is_the_references(operator, runner_directory):
    """From B = 0 a coefficient of 1 leaves -z."""
    manifest = operator.manifest
    seeds = query_seeds(2**40, 3, manifest.recipe.queries)
    with closing(opened_by_runner(manifest, runner_directory, *operator.files)) as runtime:
        for query, seed in enumerate(seeds.tolist()):
            runtime.load(np.zeros(manifest.size, np.float32))
            runtime.replay(seeds, np.eye(manifest.recipe.queries, dtype=np.float32)[query], EPS)
            np.testing.assert_allclose(-runtime.adapter(), gaussian(tuple(seed), manifest.size), rtol=0, atol=1e-5)
