"""The engine contract, over the native runner and Python: one run, one ledger, to the byte, whatever happens to it.

The phone's engine has the same tests over a real adbd in tests/device_agent/adb.
"""

import contextlib

import numpy as np
import pytest

from device_agent.engines.child_process import PythonEngine, finish, prepare
from device_agent.errors import DoesNotFit, RuntimeFailed
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.zo.trajectory import Limits
from tests.device_agent.conftest import copy_run
from tests.device_agent.engines.runs import hashes, ledger, recorded_steps

SETTINGS = {"steps": 40, "lr": 0.3, "schedule": "linear", "seed": 3, "evaluation_interval": 12}
# So many steps that a stop, a kill or a limit in the middle of the run comes in time.
LONG = SETTINGS | {"steps": 300, "evaluation_interval": 70}


def train(engine, run, stop=lambda: False):
    reports = []
    message = engine.train(run, reports.append, stop)
    return message, reports


@pytest.fixture
def begun(rademacher, dataset, run):
    """A run that no engine has touched."""
    run.begin(rademacher.plan(dataset, **SETTINGS))
    return run


@pytest.fixture
def long(rademacher, dataset, run):
    """The same with many steps."""
    run.begin(rademacher.plan(dataset, **LONG))
    return run


def test_both_engines_make_one_ledger_and_one_result(program, native, dataset, tmp_path):
    """On one machine even Gaussian noise is the same to the bit: both link one ExecuTorch."""
    results = []
    for engine in (native, PythonEngine()):
        run = RunDirectory(tmp_path / engine.name)
        run.begin(program.plan(dataset, **SETTINGS))
        message, reports = train(engine, run)
        assert [progress.step for progress in reports if progress.phase == "training"] == list(
            range(1, SETTINGS["steps"] + 1)
        )
        assert run.result() == message.result
        measured = {"train_seconds": 0, "seconds": 0, "peak_rss_bytes": 0}
        results.append((hashes(run), message.result.model_copy(update=measured)))
    assert results[0] == results[1]


def test_a_run_goes_on_by_the_other_engine(long, native, tmp_path):
    """An agent that gets its runner in the middle of a run loses nothing."""
    whole = copy_run(long, tmp_path / "whole")
    train(native, whole)
    for engine, until in ((PythonEngine(), 5), (native, 11), (PythonEngine(), LONG["steps"] + 1)):
        reports = []
        stop = lambda reports=reports, until=until: bool(reports) and reports[-1].step >= until  # noqa: E731
        engine.train(long, reports.append, stop)
    assert hashes(long) == hashes(whole)


def test_it_stops_after_the_call_in_progress(long, native):
    reports = []
    message = native.train(long, reports.append, lambda: any(progress.step >= 3 for progress in reports))
    assert message.stopped
    assert 3 <= ledger(long).steps < LONG["steps"]
    assert long.figures().peak_rss_bytes > 0


@pytest.mark.parametrize("rest", [pytest.param(0.5, marks=pytest.mark.slow), 1e-5])
def test_limits_are_obeyed_and_noted(begun, native, tmp_path, rest):
    """Shorter examples and pauses: the ledger says so, and Python's run under them is the same."""
    shorter = Limits(rest=rest, max_length=14)
    begun.limit(shorter)
    twin, free = copy_run(begun, tmp_path / "twin"), copy_run(begun, tmp_path / "free")
    (free.path / "limits").unlink()
    train(native, begun)
    assert [limit.model_dump() for limit in ledger(begun).limits] == [{"step": 0, "rest": rest, "max_length": 14}]
    train(native, free)
    assert ledger(free).limits == []
    assert ledger(free).coefficients[0].tobytes() != ledger(begun).coefficients[0].tobytes()
    train(PythonEngine(), twin)
    assert hashes(twin) == hashes(begun)


def test_limits_that_change_hold_from_the_next_step(long, native):
    reports = []

    def report(progress):
        reports.append(progress)
        if progress.phase == "training" and progress.step == 4:
            long.limit(Limits(max_length=14))

    native.train(long, report, lambda: False)
    (limit,) = ledger(long).limits
    assert limit.step >= 4
    assert limit.max_length == 14
    assert ledger(long).steps == LONG["steps"]


def test_a_torn_ledger_loses_its_last_frame_only(long, native, tmp_path):
    whole = copy_run(long, tmp_path / "whole")
    train(native, whole)
    native.train(long, lambda progress: None, lambda: recorded_steps(long) >= 6)
    data = long.ledger.read_bytes()
    long.ledger.write_bytes(data[:-3])
    train(native, long)
    assert hashes(long) == hashes(whole)


def test_another_runs_ledger_is_refused(begun, native, rademacher, dataset, tmp_path):
    other = RunDirectory(tmp_path / "other")
    other.begin(rademacher.plan(dataset, **{**SETTINGS, "seed": 4, "steps": 2}))
    train(native, other)
    begun.ledger.write_bytes(other.ledger.read_bytes())
    message, _ = train(native, begun)
    assert "trajectory of another run" in message.error.detail
    assert begun.ledger.read_bytes() == other.ledger.read_bytes()


def test_a_diverging_run_ends_with_its_reason(begun, native, rademacher):
    """A B beyond all numbers, which the next step finds."""
    with contextlib.closing(begun.open_trajectory(begun.plan())) as file:
        file.append_step(np.full(rademacher.manifest.recipe.queries, np.inf, np.float32))
    message, _ = train(native, begun)
    assert message.error.code == "diverged"
    assert "diverged at step 1" in message.error.detail
    assert "lower lr" in message.error.detail
    assert ledger(begun).steps == 1


def test_a_disk_that_is_full_when_usage_is_noted_loses_nothing(begun, engine, tmp_path):
    """/dev/full refuses every byte with ENOSPC, as a full disk does."""
    whole = copy_run(begun, tmp_path / "whole")
    train(engine, whole)
    (begun.path / "figures.json.new").symlink_to("/dev/full")
    with pytest.raises(DoesNotFit, match="the disk is full; free some space"):
        engine.train(begun, lambda _progress: None, lambda: False)
    assert begun.result() is None
    (begun.path / "figures.json.new").unlink(missing_ok=True)
    train(engine, begun)
    assert hashes(begun) == hashes(whole)


def test_what_the_runner_left_is_checked(begun, native):
    train(native, begun)
    (begun.path / "best.f32").write_bytes(b"\0" * 8)
    with pytest.raises(RuntimeFailed, match="no B of this program"):
        finish(begun, TrainerMessage(trained=True))


def test_a_damaged_plan_is_written_again(begun):
    assert prepare(begun) is None
    whole = begun.native_plan.read_bytes()
    for harmed in (whole[:-30], b""):
        begun.native_plan.write_bytes(harmed)
        assert prepare(begun) is None
        assert begun.native_plan.read_bytes() == whole
    mtime = begun.native_plan.stat().st_mtime_ns
    assert prepare(begun) is None
    assert begun.native_plan.stat().st_mtime_ns == mtime
