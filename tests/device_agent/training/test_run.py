"""Whole runs by real executors: one run, one ledger, to the byte, whatever happens to it."""

import pytest

from device_agent.errors import RuntimeFailed
from device_agent.executors.python import PythonLauncher
from device_agent.training.run import train_run
from shared.errors import Conflict, Unavailable
from tests.device_agent.training.runs import begun, fill_disk, hashes, ignore, recorded_steps, train, train_until

SETTINGS = {"steps": 40, "lr": 0.3, "schedule": "linear", "seed": 3, "evaluation_interval": 12}
EXACT = {"lr": 0.02, "max_norm": 1.0, "weight_decay": 0.01}
# Too low a rate to change any answer or loss: no validation is better than the first.
IDLE = {"steps": 40, "lr": 1e-30, "evaluation_interval": 4, "patience": 3}


@pytest.fixture
def plan(rademacher, dataset):
    return rademacher.plan(dataset, **SETTINGS)


@pytest.fixture
def begun_run(run, plan):
    return begun(run.path, plan)


@pytest.mark.parametrize("name", ["rademacher", pytest.param("gradient", marks=pytest.mark.slow)])
def test_a_run_that_stops_resumes_by_any_executor_and_a_torn_ledger_loses_its_last_frame_only(
    request, launcher, dataset, tmp_path, name
):
    """An agent that gets its runner in the middle of a run loses nothing."""
    plan = request.getfixturevalue(name).plan(dataset, **SETTINGS | (EXACT if name == "gradient" else {}))
    whole, run = begun(tmp_path / "whole", plan), begun(tmp_path / "run", plan)
    train(whole, launcher)
    for each, step in ((launcher, 3), (PythonLauncher(), 5), (launcher, 13)):
        train_until(run, each, step)
        assert recorded_steps(run) == step
        assert run.figures().peak_rss_bytes > 0
    run.trajectory.write_bytes(run.trajectory.read_bytes()[:-3])
    assert recorded_steps(run) == 12
    assert train(run, launcher).steps == SETTINGS["steps"]
    if name == "rademacher":
        assert hashes(run) == hashes(whole)


def test_a_ledger_that_is_not_this_runs_is_refused_and_stays_as_it_is(
    begun_run, launcher, rademacher, dataset, tmp_path
):
    other = begun(tmp_path / "other", rademacher.plan(dataset, **SETTINGS | {"seed": 4, "steps": 2}))
    train(other, launcher)
    begun_run.trajectory.write_bytes(other.trajectory.read_bytes())
    with pytest.raises(Conflict, match="trajectory of another run"):
        train(begun_run, launcher)
    assert begun_run.trajectory.read_bytes() == other.trajectory.read_bytes()


@pytest.mark.parametrize("name", ["rademacher", "gradient"])
def test_a_disk_that_fills_up_loses_nothing(request, name, launcher, dataset, tmp_path, small_disk):
    """While steps, an evaluation and a checkpoint are written."""
    plan = request.getfixturevalue(name).plan(dataset, **SETTINGS | {"lr": 0.02})
    whole, run = begun(tmp_path / "whole", plan), begun(small_disk("2m") / "run", plan)
    train(whole, launcher)
    filler = run.path.parent / "filler"

    def fill(progress):
        if progress.phase == "training" and progress.step == 7 and not filler.exists():
            fill_disk(filler)

    with pytest.raises(OSError, match="No space left on device"):
        train(run, launcher, fill)
    assert run.result() is None
    assert 7 <= recorded_steps(run) < SETTINGS["steps"]
    filler.unlink()
    train(run, launcher)
    assert hashes(run) == hashes(whole)


def test_a_run_is_trained_by_one_process_at_a_time(begun_run, launcher):
    calls = []
    with begun_run.lock(), pytest.raises(Unavailable, match="another process trains the run"):
        train_run_counting(begun_run, launcher, calls)
    assert train_run_counting(begun_run, launcher, calls).steps == SETTINGS["steps"]
    assert calls == [0]  # data and program are loaded before the first step


def test_a_program_that_does_not_load_says_so_and_does_not_count_as_loaded(run, plan, launcher, tmp_path):
    damaged = tmp_path / "damaged.pte"
    damaged.write_bytes(b"bad" * 100)
    calls = []
    run.begin(plan.model_copy(update={"program": damaged}))
    with pytest.raises(RuntimeFailed, match="does not load"):
        train_run_counting(run, launcher, calls)
    assert calls == []


def train_run_counting(run, launcher, calls):
    return train_run(run, launcher, ignore, loaded=lambda: calls.append(recorded_steps(run)))


@pytest.mark.parametrize("name", ["rademacher", "gradient"])
def test_a_run_ends_when_its_patience_does(launcher, name, request, run, dataset):
    begun(run.path, request.getfixturevalue(name).plan(dataset, **IDLE))
    result = train(run, launcher)
    validation_steps = [evaluation.step for evaluation in result.evaluations if evaluation.split == "validation"]
    assert (result.steps, result.best_step, validation_steps) == (12, 0, [0, 4, 8, 12])
    assert result.evaluations[-1].adapter == "best"  # on the test split
    before = hashes(run)
    (run.path / "result.json").unlink()  # killed before the result was written
    again = train(run, launcher)
    assert (again.steps, again.evaluations, hashes(run)) == (12, result.evaluations, before)
