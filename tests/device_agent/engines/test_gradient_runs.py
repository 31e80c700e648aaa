"""The engine contract for runs with an optimizer: they resume from checkpoints, since no ledger replays its state."""

import shutil

import numpy as np
import pytest

from device_agent.engines.child_process import PythonEngine
from device_agent.errors import DoesNotFit
from device_agent.training.checkpoints import CheckpointDirectory
from device_agent.training.journal import RunDirectory
from shared.zo.lora import load_adapter
from shared.zo.trajectory import Limits, TrajectoryFile
from tests.device_agent.conftest import copy_run
from tests.device_agent.engines.runs import KillAt, hashes, ledger
from tests.device_agent.warm_starts import begin_from, random_b

SETTINGS = {"steps": 24, "lr": 0.02, "schedule": "cosine", "seed": 11, "evaluation_interval": 7, "max_norm": 1.0}
SETTINGS |= {"weight_decay": 0.01}


@pytest.fixture
def begun(gradient, dataset, run):
    """A run that no engine has touched."""
    run.begin(gradient.plan(dataset, **SETTINGS))
    return run


@pytest.fixture
def whole(begun, native, tmp_path):
    """The same run, trained without a disturbance."""
    run = copy_run(begun, tmp_path / "whole")
    assert train(native, run).result is not None
    return run


def train(engine, run, report=lambda _progress: None, stop=lambda: False):
    return engine.train(run, report, stop)


def until(engine, run, step):
    """Trains until the engine tells of `step`."""
    reports = []
    message = train(engine, run, reports.append, lambda: any(has_reached(progress, step) for progress in reports))
    assert message.stopped


def has_reached(progress, step):
    return progress.phase == "training" and progress.step >= step


def checkpoints(run):
    return CheckpointDirectory(run.path / "checkpoints")


def test_both_engines_make_the_same_steps(begun, gradient, tmp_path, native):
    results, losses, adapters = [], [], []
    for engine in (native, PythonEngine()):
        run, reports = copy_run(begun, tmp_path / engine.name), []
        message = train(engine, run, reports.append)
        assert [progress.step for progress in reports if progress.phase == "training"] == list(
            range(1, SETTINGS["steps"] + 1)
        )
        assert run.result() == message.result
        assert ledger(run).header.exact
        results.append(message.result)
        losses.append(np.concatenate(ledger(run).coefficients))
        adapters.append(load_adapter(run.last.read_bytes(), gradient.manifest.size))
    np.testing.assert_allclose(losses[0][:5], losses[1][:5], rtol=1e-5)
    np.testing.assert_allclose(*adapters, atol=1e-3)
    steps = ([(evaluation.step, evaluation.split) for evaluation in result.evaluations] for result in results)
    assert next(steps) == next(steps)
    assert results[0].evaluations[0].loss == pytest.approx(results[1].evaluations[0].loss, rel=1e-5)


@pytest.mark.slow
def test_python_killed_between_checkpoints_ends_with_the_same_bytes(gradient, dataset, run, tmp_path):
    """The run is too long to end before the signal; the runner's kills are in tests/device_agent/training."""
    engine = PythonEngine()
    run.begin(gradient.plan(dataset, **SETTINGS | {"steps": 300}))
    whole = copy_run(run, tmp_path / "whole")
    train(engine, whole)
    with pytest.raises(DoesNotFit, match="killed"):
        train(engine, run, KillAt(13))
    assert 13 <= ledger(run).steps < 300
    assert train(engine, run).result is not None
    assert hashes(run) == hashes(whole)


def test_killed_after_the_last_step_it_ends_with_the_same_bytes(begun, native, whole):
    """The ledger and the last checkpoint are complete; the results are not written."""
    shutil.copytree(whole.path, begun.path, dirs_exist_ok=True)
    expected = hashes(whole)
    for path in begun.path.iterdir():
        if path.name in ("last.safetensors", "result.json"):
            path.unlink()
    assert train(native, begun).result is not None
    assert hashes(begun) == expected


def test_a_run_goes_on_by_the_other_engine(begun, gradient, native):
    """Each reads the other's checkpoints."""
    until(native, begun, 8)
    assert max(checkpoints(begun).steps()) >= 7  # the runner may take further steps before it hears that it is to stop
    until(PythonEngine(), begun, 15)
    state = checkpoints(begun).read(checkpoints(begun).steps()[-1])
    assert state is not None
    assert state.size > gradient.manifest.size
    assert train(native, begun).result.steps == SETTINGS["steps"]


def test_a_damaged_checkpoint_is_not_used(begun, native, whole):
    until(native, begun, 12)
    for step in checkpoints(begun).steps():
        path = checkpoints(begun).path / f"step-{step}.bin"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    train(native, begun)
    assert hashes(begun) == hashes(whole)


def test_checkpoints_of_another_run_are_not_used(begun, native, whole):
    """Whose ledger was moved away, or cut off before them."""
    other = np.ones(checkpoints(whole).read(SETTINGS["steps"]).shape, np.float32)
    for step in (0, 3, 10):
        checkpoints(begun).write(step, other)
    until(native, begun, 5)
    checkpoints(begun).write(20, other)
    train(native, begun)
    assert hashes(begun) == hashes(whole)


def test_a_torn_ledger_loses_its_last_frame_only(begun, native, whole):
    until(native, begun, 12)
    begun.ledger.write_bytes(begun.ledger.read_bytes()[:-3])
    train(native, begun)
    assert hashes(begun) == hashes(whole)


def test_a_disk_that_is_full_at_a_checkpoint_loses_nothing(begun, native, whole):
    """/dev/full refuses every byte with ENOSPC, as a full disk does."""
    checkpoints(begun).path.mkdir()
    aside = checkpoints(begun).path / "step-10.bin.new"
    aside.symlink_to("/dev/full")
    with pytest.raises(DoesNotFit, match="the disk is full; free some space"):
        train(native, begun)
    assert ledger(begun).steps == 10
    aside.unlink(missing_ok=True)
    train(native, begun)
    assert hashes(begun) == hashes(whole)


def test_a_run_that_is_pulled_goes_on_from_its_start(gradient, dataset, tmp_path, native):
    """The pull moves B, leaves the optimizer's state, and is made again when steps are computed again."""
    plan = gradient.plan(dataset, **SETTINGS, proximal=0.4)
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "pieces")]
    for run in runs:
        begin_from(run, plan, random_b(gradient.manifest))
    assert train(native, runs[0]).result is not None
    for step in (3, 13):
        until(native, runs[1], step)
    train(native, runs[1])
    assert hashes(runs[0]) == hashes(runs[1])
    assert ledger(runs[0]).pulls[0] == np.float32(1 - 0.4 * SETTINGS["lr"])


@pytest.mark.slow
def test_b_is_that_of_the_ledger_even_if_a_step_comes_out_otherwise(directional, dataset, run, engine):
    """As a step may that another engine made. It also holds after a checkpoint, and with pulls."""
    plan = directional.plan(dataset, **SETTINGS, proximal=0.4)
    plan = begin_from(run, plan, random_b(directional.manifest))
    until(engine, run, 12)
    recorded = ledger(run)
    run.ledger.unlink()
    changed = TrajectoryFile(run.ledger, plan.header)
    for coefficients, factor in zip(recorded.coefficients, recorded.pulls, strict=True):
        changed.append_step(coefficients * np.float32(1.01), factor)
    changed.close()
    assert train(engine, run).result.steps == SETTINGS["steps"]
    last = load_adapter(run.last.read_bytes(), directional.manifest.size)
    np.testing.assert_array_equal(ledger(run).replay(plan.begin_b()), last)
    assert checkpoints(run).read(SETTINGS["steps"]).size == 3 * last.size + 2


@pytest.mark.slow
def test_steps_are_computed_again_under_the_limits_that_held(compile_tiny, dataset, tmp_path, native):
    """A shorter example is another example. The program has no prefix, so that limits of length apply."""
    settings = {"precision": "int8", "targets": ("q_proj", "o_proj"), "loss": "candidates", "optimizer": "momentum"}
    program = compile_tiny("gradient-int8", estimator="gradient", queries=1, **settings)
    runs = [RunDirectory(tmp_path / name) for name in ("whole", "pieces")]
    for run in runs:
        run.begin(program.plan(dataset, **SETTINGS))
        run.limit(Limits(max_length=14))
    until(native, runs[0], 4)
    steps = ledger(runs[0]).steps
    shutil.copytree(runs[0].path, runs[1].path, dirs_exist_ok=True)
    shutil.rmtree(runs[1].path / "checkpoints")
    for run in runs:
        run.limit(Limits())
        train(native, run)
    assert hashes(runs[0]) == hashes(runs[1])
    assert [(limit.step, limit.max_length) for limit in ledger(runs[1]).limits] == [(0, 14), (steps, None)]
