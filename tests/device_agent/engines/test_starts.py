"""Runs that go on from an adapter, by every engine of this machine: the same bytes, from that B, through kills."""

import signal
import threading

import numpy as np
import psutil
import pytest

from device_agent.engines.child_process import PythonEngine
from device_agent.engines.native import NativeEngine
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.runtimes import open_runtime
from device_agent.training.evaluation import measure
from device_agent.training.journal import RunDirectory
from shared.canonical import file_sha256
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 12, "lr": 0.3, "seed": 3, "evaluation_interval": 5}
MANY = 300  # steps: whoever kills a run in its midst comes in time
FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


@pytest.fixture(params=["native", "python"])
def engine(request):
    if request.param == "native":
        return NativeEngine(request.getfixturevalue("runner_directory"))
    return PythonEngine()


def begin(path, program, dataset, **training):
    run = RunDirectory(path)
    begin_from(run, program.plan(dataset, **{**SETTINGS, **training}), random_b(program.manifest))
    return run


def train(engine, run, report=lambda progress: None):
    return engine.train(run, report, lambda: False)


def hashes(run):
    return [file_sha256(run.path / name) for name in FILES]


def ledger(run):
    return parse_trajectory(run.ledger.read_bytes())[0]


@pytest.mark.parametrize("name", [pytest.param("rademacher", marks=pytest.mark.slow), "stored"])
def test_both_engines_go_on_alike(request, name, dataset, tmp_path, runner_directory):
    program = request.getfixturevalue(name)
    runs = []
    for engine in (NativeEngine(runner_directory), PythonEngine()):
        runs.append(begin(tmp_path / engine.name, program, dataset))
        assert train(engine, runs[-1]).result is not None
    assert hashes(runs[0]) == hashes(runs[1])


@pytest.fixture
def native(runner_directory):
    """The faster one, for what both are known to do alike."""
    return NativeEngine(runner_directory)


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
    killed = threading.Event()

    def kill(progress):
        if progress.phase == "training" and progress.step >= 4 and not killed.is_set():
            killed.set()
            for child in psutil.Process().children():
                if "train" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)

    with pytest.raises((DoesNotFit, RuntimeFailed), match="killed"):
        train(engine, run, kill)
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
