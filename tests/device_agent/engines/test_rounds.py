"""Runs that go on from an adapter, and of a cohort's round: by every engine, through pulls and kills."""

from datetime import UTC, datetime

import numpy as np
import pytest

from device_agent.errors import DoesNotFit
from device_agent.runtimes import open_runtime
from device_agent.training.data import read_splits
from device_agent.training.evaluation import measure
from device_agent.training.journal import RunDirectory
from device_agent.training.trainer import Stopped, Trainer
from shared.canonical import file_sha256
from shared.federation.cohort import AlgorithmSettings, RoundTask
from shared.zo.lora import load_adapter
from shared.zo.noise import query_seeds
from shared.zo.noise import rademacher as noise
from tests.device_agent.engines.runs import KillAt, hashes, ledger
from tests.device_agent.training.test_trainer import AfterCalls
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 12, "lr": 0.3, "schedule": "cosine", "seed": 3, "evaluation_interval": 5}
MANY = 300  # steps: whoever kills a run in its midst comes in time
MU = 0.4


def begin(path, program, dataset, mu=MU, start=True, **training):
    run = RunDirectory(path)
    algorithm = AlgorithmSettings(name="fedprox", mu=mu) if mu else AlgorithmSettings()
    task = RoundTask(cohort="reviews", number=3, algorithm=algorithm, deadline=datetime(2030, 1, 1, tzinfo=UTC))
    plan = program.plan(dataset, **{**SETTINGS, **training}).model_copy(update={"round": task})
    if start:
        begin_from(run, plan, random_b(program.manifest))
    else:
        run.begin(plan)
    return run


def train(engine, run, report=lambda progress: None):
    return engine.train(run, report, lambda: False)


def in_process(run, program, stop=lambda: False):
    """The result of the same run by the Python trainer on ExecuTorch's Python runtime."""
    plan = run.plan()
    runtime = open_runtime(plan.manifest, plan.program, plan.weights)
    splits = read_splits(
        plan.dataset,
        plan.task,
        program.tokenizer,
        plan.manifest.recipe,
        plan.training,
        noise_key=plan.noise_key,
        with_test=not plan.uploads_last,
    )
    try:
        return Trainer(run, plan, splits, runtime, lambda _progress: None, stop).train()
    finally:
        runtime.close()


@pytest.mark.parametrize(("name", "start"), [("rademacher", True), ("stored", False)])
def test_both_implementations_pull_alike(request, name, start, dataset, tmp_path, native):
    program = request.getfixturevalue(name)
    runs = [begin(tmp_path / which, program, dataset, start=start) for which in ("native", "python")]
    assert train(native, runs[0]).result is not None
    in_process(runs[1], program)
    assert hashes(runs[0]) == hashes(runs[1])
    assert ledger(runs[0]).header.proximal == MU


def test_b_is_what_the_coefficients_and_the_pulls_say(native, rademacher, dataset, tmp_path):
    """Element by element in float32, from FedProx's formula; the ledger's own replay agrees to the bit."""
    run = begin(tmp_path / "run", rademacher, dataset)
    result = train(native, run).result
    trajectory, size = ledger(run), rademacher.manifest.size
    expected = start = random_b(rademacher.manifest)
    for step, coefficients in enumerate(trajectory.coefficients):
        for seed, coefficient in zip(query_seeds(3, step, 2).tolist(), coefficients, strict=True):
            expected = np.subtract(expected, coefficient * noise(tuple(seed), size), dtype=np.float32)
        rate = 0.3 * (1 + np.cos(np.pi * step / 12)) / 2
        assert trajectory.pulls[step] == np.float32(1 - MU * rate)
        away = np.subtract(expected, start, dtype=np.float32) * trajectory.pulls[step]
        expected = np.add(start, away, dtype=np.float32)
    last = load_adapter(run.last.read_bytes(), size)
    np.testing.assert_array_equal(last, expected)
    np.testing.assert_array_equal(trajectory.replay(start), expected)
    free = begin(tmp_path / "free", rademacher, dataset, mu=0)
    train(native, free)
    unpulled = load_adapter(free.last.read_bytes(), size)
    assert np.linalg.norm(last - start) < 0.9 * np.linalg.norm(unpulled - start)
    assert result.best_step == SETTINGS["steps"]


@pytest.mark.parametrize("which", ["native", "python"])
def test_the_last_b_is_handed_in_and_its_validation_reported(which, native, rademacher, dataset, tmp_path):
    """Also where an earlier one was better; the test split is left alone."""
    run = begin(tmp_path / "run", rademacher, dataset, mu=0, lr=3.0, schedule="constant")
    result = train(native, run).result if which == "native" else in_process(run, rademacher)
    validations = {evaluation.step: evaluation for evaluation in result.evaluations}
    assert {evaluation.split for evaluation in result.evaluations} == {"validation"}
    assert sorted(validations) == [0, 5, 10, 12]
    assert max(evaluation.accuracy for evaluation in validations.values()) > validations[12].accuracy
    assert result.best_step == 12
    assert (result.start_accuracy, result.zero_shot_accuracy) == (validations[0].accuracy, None)
    assert result.tuned_accuracy == validations[12].accuracy
    assert run.best.read_bytes() == run.last.read_bytes()


def test_killed_it_pulls_again_from_the_ledger(native, rademacher, dataset, tmp_path):
    whole = begin(tmp_path / "whole", rademacher, dataset, steps=MANY)
    train(native, whole)
    run = begin(tmp_path / "run", rademacher, dataset, steps=MANY)
    with pytest.raises(DoesNotFit, match="killed"):
        train(native, run, KillAt(4))
    assert 4 <= ledger(run).steps < MANY
    train(native, run)
    assert hashes(run) == hashes(whole)


@pytest.mark.parametrize("calls", [4, 13])
def test_stopped_it_pulls_again_from_the_ledger(native, stored, dataset, tmp_path, calls):
    """By the Python runtime, and where replay goes by two rounded copies of B."""
    whole = begin(tmp_path / "whole", stored, dataset)
    train(native, whole)
    run = begin(tmp_path / "run", stored, dataset)
    with pytest.raises(Stopped):
        in_process(run, stored, AfterCalls(calls))
    assert ledger(run).steps < SETTINGS["steps"]
    in_process(run, stored)
    assert hashes(run) == hashes(whole)


def test_what_was_measured_before_is_the_start_and_is_called_so(native, rademacher, dataset, tmp_path):
    """And nothing better than it, as here, keeps it."""
    run, start = RunDirectory(tmp_path / "run"), random_b(rademacher.manifest)
    plan = begin_from(run, rademacher.plan(dataset, **{**SETTINGS, "steps": 2, "lr": 1e-30}), start)
    result = train(native, run).result
    runtime = open_runtime(plan.manifest, plan.program, plan.weights)
    runtime.load(start)
    tested = measure(runtime, rademacher.splits(dataset, plan.training).test, plan.manifest.recipe, dynamic=True)
    runtime.close()
    before = ledger(run).evaluations[0]
    assert (before.step, before.split, before.correct) == (0, "test", tested.correct)
    assert before.loss == pytest.approx(tested.loss, rel=1e-6)
    assert result.start_accuracy == result.before_accuracy == before.accuracy
    assert (result.zero_shot_accuracy, result.best_step) == (None, 0)
    assert ledger(run).header.start_sha256 == file_sha256(run.start)
    np.testing.assert_array_equal(load_adapter(run.best.read_bytes(), rademacher.manifest.size), start)


def test_a_start_that_is_another_file_is_refused(engine, rademacher, dataset, tmp_path):
    run = begin(tmp_path / "run", rademacher, dataset)
    run.start.write_bytes(run.start.read_bytes()[:-4] + b"\0\0\0\0")
    assert train(engine, run).error.code == "untrusted"
    assert not run.ledger.exists()
