"""Programs that call the paper's noise operator, on the runner that has its kernel, against NumPy's directions."""

from contextlib import closing

import numpy as np
import pytest

from device_agent.executors.runner import RunnerLauncher
from shared.zo.noise import gaussian, query_seeds
from tests.device_agent.native import opened_by_runner
from tests.device_agent.training.runs import begun, last_b, ledger, train, train_until

LR, EPS = 0.05, 0.01


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


@pytest.mark.slow
def test_a_whole_run_replays_from_its_ledger_and_resumes_in_the_middle(operator, dataset, tmp_path, runner_directory):
    plan, size = operator.plan(dataset, steps=6, lr=LR, seed=11, evaluation_interval=3), operator.manifest.size
    launcher = RunnerLauncher(runner_directory)
    run, resumed = begun(tmp_path / "run", plan), begun(tmp_path / "resumed", plan)
    assert train(run, launcher).steps == 6
    trained = last_b(run, operator)
    assert ledger(run).header.noise == "operator"
    np.testing.assert_allclose(trained, ledger(run).replay(np.zeros(size, np.float32)), rtol=0, atol=1e-5)
    assert np.abs(trained).max() > 1e-2
    train_until(resumed, launcher, 3)
    assert train(resumed, launcher).steps == 6
    np.testing.assert_array_equal(last_b(resumed, operator), trained)
