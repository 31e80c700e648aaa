"""A private run: what it does in each step, and what of it never leaves the device."""

import json

import numpy as np
import pytest

from device_agent.executors.program import Rates, scalar
from device_agent.jobs.leased_job import Outcome
from device_agent.training.dp_sampling import check_sample_size, draw
from shared.canonical import file_sha256
from shared.errors import InvalidDataset
from shared.privacy import MAX_SAMPLE, UNITS, ExamplePrivacy, coefficients_of
from shared.zo.lora import load_adapter
from shared.zo.noise import query_seeds
from shared.zo.packing import pack_step
from shared.zo.trajectory_reader import read_ledger
from tests.device_agent.training.runs import (
    begun,
    copy_run,
    hashes,
    last_b,
    ledger,
    opened,
    train,
    train_in_process,
    train_until,
)

PRIVACY = ExamplePrivacy(clip=0.05, noise_multiplier=0.5, sampling_rate=0.35)
SETTINGS = {"steps": 12, "lr": 0.02, "seed": 5, "evaluation_interval": 4}


@pytest.fixture
def plan(clipped, dataset):
    return clipped.plan(dataset, **SETTINGS).model_copy(update={"privacy": PRIVACY})


@pytest.fixture
def drawn(run, plan):
    """A run whose draws are there already."""
    begun(run.path, plan).dp_samples(plan, 13)
    return run


def test_each_step_is_the_mechanism_on_its_own_sample(drawn, plan, clipped):
    """The same by hand: each example alone adds what it adds, then the noise; and the coefficients follow from that."""
    run, recipe, reports = drawn, plan.manifest.recipe, []
    dp_samples = run.dp_samples(plan, 13)
    assert dp_samples.counts.max() > recipe.effective_batch  # samples that take several calls are among them
    result = train_in_process(run, plan, clipped, report=reports.append)
    assert all(progress.loss is None and progress.accuracy is None for progress in reports)
    assert not run.dp_samples_file.exists()
    examples = clipped.splits(plan.dataset, plan.training).train
    assert len(examples) == 13  # nothing is held out
    runtime = opened(plan)
    zeros, eps = np.zeros(recipe.queries, np.float32), plan.training.eps_for(recipe)
    for step in range(12):
        seeds, totals = query_seeds(5, step, recipe.queries), dp_samples.noise[step].copy()
        for index in dp_samples.sample(step):
            tokens, *labels = pack_step([examples[index]], recipe)
            hidden = runtime.prefix(tokens)
            alone, _ = runtime.step(tuple(labels), seeds, 0.0, eps, (scalar(PRIVACY.clip), zeros), hidden)
            assert float(np.square(alone, dtype=np.float64).sum()) <= UNITS**2
            totals += alone
        expected = coefficients_of(totals, PRIVACY.clip, 0.02, eps, recipe.effective_batch)
        np.testing.assert_allclose(ledger(run).coefficients[step], expected, rtol=1e-6)
        runtime.replay(seeds, ledger(run).coefficients[step], eps)
    np.testing.assert_array_equal(last_b(run, clipped), runtime.adapter())
    runtime.close()
    assert file_sha256(run.best) == file_sha256(run.last)
    assert result.best_step == 12


@pytest.fixture(scope="session")
def gradients(compile_tiny):
    """For private runs by exact gradients (DP-SGD)."""
    settings = {"estimator": "gradient", "privacy": "clipped", "layers": "last:1", "effective_batch": 2, "queries": 1}
    return compile_tiny("private-gradient", **settings)


@pytest.mark.slow
def test_each_step_by_gradients_is_the_mechanism_on_its_own_sample(run, gradients, dataset):
    """By hand, example by example, then the noise; tests/server/compiler holds both to their bounds and formulas."""
    training = SETTINGS | {"schedule": "cosine", "weight_decay": 0.01}
    plan = gradients.plan(dataset, **training).model_copy(update={"privacy": PRIVACY})
    dp_samples = begun(run.path, plan).dp_samples(plan, 13)
    result = train_in_process(run, plan, gradients)
    examples = gradients.splits(dataset, plan.training).train
    runtime, norms = opened(plan, resident=True), []
    for step in range(12):
        totals = np.zeros(plan.manifest.size, np.int32)
        rates = Rates(plan.training.lr_at(step), plan.training.max_norm, plan.training.weight_decay)
        for indices in [*([index] for index in dp_samples.sample(step)), []]:
            tokens, *labels = pack_step([examples[index] for index in indices], plan.manifest.recipe)
            last = scalar(not indices)
            secret = (scalar(PRIVACY.clip), scalar(PRIVACY.sigma), last, dp_samples.keys[step], totals)
            totals, norm = runtime.gradient_step(tuple(labels), rates, secret, runtime.prefix(tokens))
        norms.append(norm)
    np.testing.assert_array_equal(last_b(run, gradients), runtime.adapter())
    np.testing.assert_array_equal(ledger(run).coefficients, norms)  # a norm of noise, in place of a loss
    runtime.close()
    assert (result.train_examples, result.evaluations, ledger(run).evaluations) == (None, (), [])


def test_a_run_that_stops_resumes_with_the_same_draws(drawn, plan, clipped, tmp_path, launcher):
    """By the native runner, with the bytes that the Python runtime makes of the same draws."""
    twin, reports = copy_run(drawn, tmp_path / "twin"), []
    train_in_process(twin, plan, clipped)
    train_until(drawn, launcher, 5)
    drawn.trajectory.write_bytes(drawn.trajectory.read_bytes()[:-5])  # a step that a kill undid
    assert drawn.dp_samples_file.exists()
    assert train(drawn, launcher, reports.append).train_examples is None
    assert all(progress.loss is None and progress.accuracy is None for progress in reports)
    assert hashes(drawn) == hashes(twin)
    assert not drawn.dp_samples_file.exists()


def test_data_that_changes_ends_no_run(drawn, plan, clipped, dataset):
    run, first = drawn, drawn.dp_samples(plan, 13)
    with (dataset / "train.jsonl").open("a") as file:
        file.write(json.dumps({"text": "warm film", "label": "positive"}) + "\n")
    again = run.dp_samples(plan, 14)
    assert not np.array_equal(first.noise, again.noise)
    train_in_process(run, plan, clipped)
    assert ledger(run).steps == 12


def test_a_sample_is_every_example_with_the_same_chance_by_itself():
    dp_samples = draw(PRIVACY, 40, 4000, 1, np.random.default_rng(0).bytes)
    present = np.zeros((4000, 40), bool)
    for step in range(4000):
        present[step, dp_samples.sample(step)] = True
    spread = np.sqrt(0.35 * 0.65 / 4000)
    assert np.abs(present.mean(axis=0) - 0.35).max() < 5 * spread
    assert abs(present.sum(axis=1).var() - 40 * 0.35 * 0.65) < 1.5  # of a binomial, not of a fixed size
    pairs = np.corrcoef(present.T)
    assert np.abs(pairs - np.eye(40)).max() < 6 / np.sqrt(4000)


def test_too_many_examples_for_one_step_are_refused_by_the_number_of_records():
    check_sample_size(ExamplePrivacy(noise_multiplier=1, sampling_rate=1), MAX_SAMPLE)
    check_sample_size(ExamplePrivacy(noise_multiplier=1, sampling_rate=0.1), 8 * MAX_SAMPLE)
    for rate, records in ((1, MAX_SAMPLE + 1), (0.1, 10 * MAX_SAMPLE)):
        with pytest.raises(InvalidDataset, match="lower sampling_rate"):
            check_sample_size(ExamplePrivacy(noise_multiplier=1, sampling_rate=rate), records)
    with pytest.raises(InvalidDataset, match="lower sampling_rate"):
        draw(ExamplePrivacy(noise_multiplier=1, sampling_rate=1), MAX_SAMPLE + 1, 2, 1)


def test_a_step_may_see_nobody(run, plan, clipped):
    rare = plan.model_copy(update={"privacy": ExamplePrivacy(clip=0.05, noise_multiplier=0.5, sampling_rate=1e-9)})
    train_in_process(run, rare, clipped)
    assert ledger(run).steps == 12
    assert all(np.abs(coefficients).max() > 0 for coefficients in ledger(run).coefficients)  # it is noise alone


def test_of_a_whole_job_nothing_is_sent_that_the_data_decides(enrolled, make, server, clipped, dataset):
    training, server.lease_seconds = SETTINGS | {"steps": 40}, 0.5
    enrolled.rules.write_text("trajectory = true")
    daemon = make(enrolled)
    server.add_job(clipped, job_id="job-good", trajectory="beside", privacy=PRIVACY, **training)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    (dataset / "train.jsonl").write_text('{"text": "warm"}\n')
    server.add_job(clipped, job_id="job-bad", privacy=PRIVACY, **training)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED  # by noise alone
    field_names = {name for beat in server.beats for name, value in beat if value not in (None, 0)}
    assert server.beats
    assert field_names <= {"phase", "step", "steps", "lr", "why"}
    completion, _ = server.completions
    measured = completion.result.model_dump(exclude_none=True, exclude_defaults=True).keys()
    assert measured == {"steps", "best_step", "train_seconds", "seconds", "peak_rss_bytes"}
    trajectory = read_ledger(server.trajectories[0])
    assert (trajectory.steps, trajectory.evaluations) == (40, [])
    b = load_adapter(server.uploads[0], clipped.manifest.size)
    np.testing.assert_array_equal(trajectory.replay(np.zeros_like(b)), b)  # B tells what the trajectory tells
    assert server.failures == []


@pytest.mark.parametrize(
    "privacy", [PRIVACY, PRIVACY.model_copy(update={"noise_multiplier": None, "epsilon": 3.0}), None]
)
def test_a_job_that_would_not_keep_its_privacy_is_not_trained(daemon, server, clipped, rademacher, privacy):
    server.add_job(rademacher if privacy is PRIVACY else clipped, privacy=privacy, steps=2)
    assert daemon.run(once=True).outcome is Outcome.FAILED
    assert [failure.code for failure in server.failures] == ["untrusted"]
    assert server.uploads == []
