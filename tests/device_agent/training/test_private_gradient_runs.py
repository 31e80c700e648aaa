"""A private run with exact gradients (DP-SGD): what it does in each step."""

import numpy as np
import pytest

from device_agent.executors.program import PrivateGradientInput, Rates
from device_agent.executors.python import PythonLauncher
from device_agent.training.dp_sampling import draw
from shared.canonical import file_sha256
from shared.privacy import NOISE_KEYS, NOISE_UNITS, ExamplePrivacy, gradient_noise
from shared.zo.encoding import pack_step
from tests.device_agent.conftest import copy_run
from tests.device_agent.training.runs import (
    begun,
    hashes,
    last_b,
    ledger,
    opened,
    recorded_steps,
    train,
    train_in_process,
    train_until,
)

pytestmark = pytest.mark.slow  # its program is used nowhere else; test_private_runs.py has the scalar form
PRIVACY = ExamplePrivacy(clip=0.5, noise_multiplier=0.7, sampling_rate=0.2)
SETTINGS = {"steps": 13, "lr": 0.02, "schedule": "cosine", "seed": 5, "evaluation_interval": 4, "weight_decay": 0.01}


@pytest.fixture(scope="session")
def private(compile_tiny):
    return compile_tiny(
        "private-gradient", estimator="gradient", privacy="clipped", layers="last:1", effective_batch=2, queries=1
    )


@pytest.fixture
def plan(private, dataset):
    return private.plan(dataset, **SETTINGS).model_copy(update={"privacy": PRIVACY})


def test_each_step_is_the_mechanism_on_its_own_sample(run, plan, private):
    """By hand: each example alone adds what it adds, then the noise of the step's keys; and B moves by their sum."""
    samples = begun(run.path, plan).dp_samples(plan, 13)
    recipe, size = plan.manifest.recipe, plan.manifest.size
    assert samples.counts.max() > recipe.effective_batch  # samples that take several calls are among them
    assert samples.counts.min() == 0 or len(samples.counts) == 13
    result = train_in_process(run, plan, private)
    examples = private.splits(plan.dataset, plan.training).train
    runtime = opened(plan, resident=True)
    norms = []
    for step in range(13):
        totals = np.zeros(size, np.int32)
        rates = Rates(plan.training.lr_at(step), plan.training.max_norm, plan.training.weight_decay)

        def call(indices, carried, *, last, step=step, rates=rates):
            tokens, *labels = pack_step([examples[index] for index in indices], recipe)
            secret = PrivateGradientInput(PRIVACY.clip, PRIVACY.sigma, last, samples.keys[step], carried)
            return runtime.gradient_suffix(runtime.prefix(tokens), tuple(labels), rates, secret)

        for index in samples.sample(step):
            alone, _ = call([index], np.zeros(size, np.int32), last=False)
            units = alone.astype(np.int64)
            assert 0 < int(units @ units) <= (NOISE_UNITS / PRIVACY.sigma) ** 2
            totals += alone
        noised, norm = call([], totals, last=True)
        assert np.abs(noised - totals - gradient_noise(samples.keys[step], size)).max() <= 1
        mean = noised * (PRIVACY.clip * PRIVACY.sigma / NOISE_UNITS / recipe.effective_batch)
        np.testing.assert_allclose(norm, [np.linalg.norm(mean)], rtol=1e-5)
        norms.append(norm)
    np.testing.assert_array_equal(last_b(run, private), runtime.adapter())
    np.testing.assert_array_equal(ledger(run).coefficients, norms)  # a norm of noise, in place of a loss
    runtime.close()
    assert file_sha256(run.best) == file_sha256(run.last)
    assert (result.best_step, result.train_examples, result.evaluations) == (13, None, ())
    assert ledger(run).evaluations == []
    assert not run.dp_samples_file.exists()


@pytest.mark.parametrize("which", ["native", "python"])
def test_a_run_that_stops_resumes_with_the_same_draws(plan, private, tmp_path, launcher, which):
    launcher = PythonLauncher() if which == "python" else launcher
    whole = begun(tmp_path / "whole", plan)
    whole.dp_samples(plan, 13)
    stopped, by_hand = copy_run(whole, tmp_path / "stopped"), copy_run(whole, tmp_path / "by-hand")
    reports = []
    train(whole, launcher, reports.append)
    assert all(progress.loss is None and progress.accuracy is None for progress in reports)
    train_until(stopped, launcher, 7)
    assert recorded_steps(stopped) == 7
    train(stopped, launcher)
    assert hashes(stopped) == hashes(whole)
    assert not whole.dp_samples_file.exists()
    assert not stopped.dp_samples_file.exists()
    train_in_process(by_hand, plan, private)
    np.testing.assert_allclose(last_b(whole, private), last_b(by_hand, private), atol=2e-3)


def test_keys_are_drawn_with_the_samples_and_kept_until_the_end(run, plan):
    begun(run.path, plan)
    first, again = run.dp_samples(plan, 13), run.dp_samples(plan, 13)
    assert first.keys.shape == (13, NOISE_KEYS, 2)
    np.testing.assert_array_equal(first.keys, again.keys)
    assert first.noise.size == 0
    other = draw(PRIVACY, 13, 13, None)
    assert not np.array_equal(first.keys, other.keys)
    assert run.dp_samples_file.stat().st_mode & 0o077 == 0 or run.path.stat().st_mode & 0o077 == 0
