"""A phone, an adb that reaches it, and what a run amounts to without one."""

import pytest

from device_agent.android.adb import Adb
from device_agent.engines.child_process import NativeEngine
from device_agent.training.journal import RunDirectory
from shared.zo.trajectory import Limits
from tests.device_agent.android.packages import Missing
from tests.device_agent.android.phone import Phone
from tests.device_agent.conftest import write_records

TRAINING = {"steps": 16, "evaluation_interval": 8, "seed": 5, "lr": 1e-2}
REST = Limits(rest=40)  # so that a run of tiny steps lasts long enough to be disturbed


@pytest.fixture(scope="session")
def machine(tmp_path_factory):
    """The phone itself; skips where this machine cannot give one."""
    try:
        phone = Phone(tmp_path_factory.mktemp("phone"))
    except Missing as error:
        pytest.skip(f"no phone: {error}")
    yield phone
    phone.close()


@pytest.fixture
def phone(machine):
    """The phone, with one adbd that is connected and nothing kept or running from before."""
    machine.begin()
    yield machine
    machine.end()


@pytest.fixture
def adb(phone):
    return Adb(phone.serial, phone.adb)


@pytest.fixture(scope="session")
def movies(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "movies"
    directory.mkdir()
    for seed, (split, count) in enumerate((("train", 13), ("validation", 9), ("test", 7))):
        write_records(directory / f"{split}.jsonl", count, seed)
    return directory


def begin(path, program, movies, limits=REST, **training):
    """A new run at `path`."""
    run = RunDirectory(path)
    run.begin(program.plan(movies, **TRAINING | training))
    if limits is not None:
        run.limit(limits)
    return run


@pytest.fixture(scope="session")
def expected(rademacher, movies, runner_directory, tmp_path_factory):
    """The directory of the same run by the native engine, undisturbed."""
    run = begin(tmp_path_factory.mktemp("expected") / "run", rademacher, movies)
    assert NativeEngine(runner_directory).train(run, lambda _: None, lambda: False).result is not None
    return run


@pytest.fixture
def run(tmp_path, rademacher, movies):
    return begin(tmp_path / "run", rademacher, movies)
