"""A private run with exact gradients (DP-SGD), on the real program by both engines."""

import numpy as np
import pytest

from device_agent.engines.child_process import NativeEngine, PythonEngine
from device_agent.runtimes import PrivateGradientInput, Rates, open_runtime
from device_agent.training.dp_sampling import draw
from device_agent.training.journal import RunDirectory
from shared.canonical import file_sha256
from shared.privacy import NOISE_KEYS, NOISE_UNITS, ExamplePrivacy, gradient_noise
from shared.zo.encoding import pack_step
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.conftest import copy_run
from tests.device_agent.training.test_gradient_trainer import DyingRuntime, Killed, train

pytestmark = pytest.mark.slow  # its program is used nowhere else; test_private_runs.py has the scalar form
PRIVACY = ExamplePrivacy(clip=0.5, noise_multiplier=0.7, sampling_rate=0.2)
SETTINGS = {"steps": 13, "lr": 0.02, "schedule": "cosine", "seed": 5, "evaluation_interval": 4, "weight_decay": 0.01}
FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


@pytest.fixture(scope="session")
def private(compile_tiny):
    return compile_tiny(
        "private-gradient", estimator="gradient", privacy="clipped", layers="last:1", effective_batch=2, queries=1
    )


@pytest.fixture
def plan(private, dataset):
    return private.plan(dataset, **SETTINGS).model_copy(update={"privacy": PRIVACY})


def begun(run, plan, examples=13):
    """A run whose draws are there already, and the draws."""
    run.begin(plan)
    return run.dp_samples(plan, examples)


def hashes(run):
    return [file_sha256(run.path / name) for name in FILES]


def ledger(run):
    return parse_trajectory(run.ledger.read_bytes())[0]


def test_each_step_is_the_mechanism_on_its_own_sample(run, plan, private):
    """By hand: each example alone adds what it adds, then the noise of the step's keys; and B moves by their sum."""
    samples, recipe, size = begun(run, plan), plan.manifest.recipe, plan.manifest.size
    assert samples.counts.max() > recipe.effective_batch  # samples that take several calls are among them
    assert samples.counts.min() == 0 or len(samples.counts) == 13
    result = train(run, plan, private)
    examples = private.splits(plan.dataset, plan.training).train
    runtime = open_runtime(plan.manifest, plan.program, plan.weights, resident=True)
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
    np.testing.assert_array_equal(load_adapter(run.last.read_bytes(), size), runtime.adapter())
    np.testing.assert_array_equal(ledger(run).coefficients, norms)  # a norm of noise, in place of a loss
    runtime.close()
    assert file_sha256(run.best) == file_sha256(run.last)
    assert (result.best_step, result.train_examples, result.evaluations) == (13, None, ())
    assert ledger(run).evaluations == []
    assert not run.dp_samples_file.exists()


def test_killed_at_every_call_it_ends_with_the_same_bytes(run, plan, private, tmp_path):
    begun(run, plan)
    pieces = copy_run(run, tmp_path / "pieces")
    train(run, plan, private)
    runtime = open_runtime(plan.manifest, plan.program, plan.weights, resident=True)
    kills = 0
    while True:
        try:
            train(pieces, plan, private, DyingRuntime(runtime, 1 + kills % 23))
            break
        except Killed:
            kills += 1
            assert kills < 500
    assert kills > 10
    assert hashes(pieces) == hashes(run)
    runtime.close()


@pytest.mark.parametrize("name", ["native", "python"])
def test_an_engine_that_is_stopped_goes_on_with_the_same_draws(plan, private, tmp_path, runner_directory, name):
    plan = plan.model_copy(update={"training": plan.training.model_copy(update={"steps": 300})})
    whole = RunDirectory(tmp_path / "whole")
    begun(whole, plan)
    stopped, by_hand = copy_run(whole, tmp_path / "stopped"), copy_run(whole, tmp_path / "by-hand")
    engine = NativeEngine(runner_directory) if name == "native" else PythonEngine()
    reports = []
    assert engine.train(whole, reports.append, lambda: False).result is not None
    assert all(progress.loss is None and progress.accuracy is None for progress in reports)
    reports.clear()
    assert engine.train(stopped, reports.append, lambda: bool(reports) and reports[-1].step >= 17).stopped
    assert 0 < ledger(stopped).steps < 300
    assert engine.train(stopped, reports.append, lambda: False).result is not None
    assert hashes(stopped) == hashes(whole)
    for run in (whole, stopped):
        assert not run.dp_samples_file.exists()
        assert not run.native_plan.exists()
    train(by_hand, plan, private)
    np.testing.assert_allclose(
        *(load_adapter(run.last.read_bytes(), plan.manifest.size) for run in (whole, by_hand)), atol=2e-3
    )


def test_keys_are_drawn_with_the_samples_and_kept_until_the_end(run, plan):
    first, again = begun(run, plan), run.dp_samples(plan, 13)
    assert first.keys.shape == (13, NOISE_KEYS, 2)
    np.testing.assert_array_equal(first.keys, again.keys)
    assert first.noise.size == 0
    other = draw(PRIVACY, 13, 13, None)
    assert not np.array_equal(first.keys, other.keys)
    assert run.dp_samples_file.stat().st_mode & 0o077 == 0 or run.path.stat().st_mode & 0o077 == 0
