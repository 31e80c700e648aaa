"""Runs that go on from an adapter, by every engine of this machine: the same bytes, from that B, through kills."""

import numpy as np
import pytest

from device_agent.engines.child_process import PythonEngine
from device_agent.errors import DoesNotFit
from device_agent.runtimes import open_runtime
from device_agent.training.evaluation import measure
from device_agent.training.journal import RunDirectory
from shared.canonical import file_sha256
from shared.zo.lora import load_adapter
from tests.device_agent.engines.runs import KillAt, hashes, ledger
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 12, "lr": 0.3, "seed": 3, "evaluation_interval": 5}
MANY = 300  # steps: whoever kills a run in its midst comes in time


def begin(path, program, dataset, **training):
    run = RunDirectory(path)
    begin_from(run, program.plan(dataset, **{**SETTINGS, **training}), random_b(program.manifest))
    return run


def train(engine, run, report=lambda progress: None):
    return engine.train(run, report, lambda: False)


def test_both_engines_go_on_alike(stored, dataset, tmp_path, native):
    runs = []
    for engine in (native, PythonEngine()):
        runs.append(begin(tmp_path / engine.name, stored, dataset))
        assert train(engine, runs[-1]).result is not None
    assert hashes(runs[0]) == hashes(runs[1])


def test_the_run_moves_on_from_the_start(native, rademacher, dataset, tmp_path):
    """NumPy's replay of the ledger from the start is the last B, to the bit; from zero it is not."""
    run = begin(tmp_path / "run", rademacher, dataset)
    train(native, run)
    trajectory, start = ledger(run), random_b(rademacher.manifest)
    assert trajectory.header.start_sha256 == file_sha256(run.start)
    last = load_adapter(run.last.read_bytes(), rademacher.manifest.size)
    np.testing.assert_array_equal(trajectory.replay(start), last)
    assert not np.array_equal(trajectory.replay(np.zeros_like(start)), last)


def test_what_was_measured_before_is_the_start_and_is_called_so(native, rademacher, dataset, tmp_path):
    """And nothing better than it, as here, keeps it."""
    run = begin(tmp_path / "run", rademacher, dataset, steps=2, lr=1e-30)
    result, plan = train(native, run).result, run.plan()
    runtime = open_runtime(plan.manifest, plan.program, plan.weights)
    runtime.load(random_b(rademacher.manifest))
    tested = measure(runtime, rademacher.splits(dataset, plan.training).test, plan.manifest.recipe, dynamic=True)
    runtime.close()
    before = ledger(run).evaluations[0]
    assert (before.step, before.split, before.correct) == (0, "test", tested.correct)
    assert before.loss == pytest.approx(tested.loss, rel=1e-6)
    assert result.start_accuracy == result.before_accuracy == before.accuracy
    assert result.zero_shot_accuracy is None
    assert result.best_step == 0
    best = load_adapter(run.best.read_bytes(), rademacher.manifest.size)
    np.testing.assert_array_equal(best, random_b(rademacher.manifest))


def test_killed_it_goes_on_from_the_start_again(engine, native, rademacher, dataset, tmp_path):
    whole = begin(tmp_path / "whole", rademacher, dataset, steps=MANY)
    train(native, whole)
    run = begin(tmp_path / "run", rademacher, dataset, steps=MANY)
    with pytest.raises(DoesNotFit, match="killed"):
        train(engine, run, KillAt(4))
    assert 4 <= ledger(run).steps < MANY
    train(engine, run)
    assert hashes(run) == hashes(whole)


def test_a_start_that_is_another_file_is_refused(engine, rademacher, dataset, tmp_path):
    run = begin(tmp_path / "run", rademacher, dataset)
    run.start.write_bytes(run.start.read_bytes()[:-4] + b"\0\0\0\0")
    message = train(engine, run)
    assert message.error.code == "untrusted"
    assert not run.ledger.exists()


def test_a_ledger_from_zero_is_not_gone_on_with_from_a_start(native, rademacher, dataset, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.begin(rademacher.plan(dataset, **{**SETTINGS, "steps": 2}))
    train(native, other)
    run = begin(tmp_path / "run", rademacher, dataset)
    run.ledger.write_bytes(other.ledger.read_bytes())
    assert "trajectory of another run" in train(native, run).error.detail
