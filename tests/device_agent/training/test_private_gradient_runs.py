"""A private run with exact gradients (DP-SGD): what it does in each step."""

import numpy as np
import pytest

from device_agent.executors.program import Rates, scalar
from shared.canonical import file_sha256
from shared.privacy import NOISE_UNITS, ExamplePrivacy, gradient_noise
from shared.zo.packing import pack_step
from tests.device_agent.training.runs import begun, last_b, ledger, opened, train_in_process

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
            secret = (scalar(PRIVACY.clip), scalar(PRIVACY.sigma), scalar(last), samples.keys[step], carried)
            return runtime.gradient_step(tuple(labels), rates, secret, runtime.prefix(tokens))

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
