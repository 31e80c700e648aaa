"""One compiled program of the built-in base, which every simulation of the suite shares."""

import json

import pytest

from server.programs import local
from simulation.session import Means, simulate
from simulation.settings import read_settings
from tests import cached_compiler
from tests.programs import held, run_directory

SMALL = {
    "devices": 6,
    "rounds": 2,
    "data": {"per_device": 6, "held_out": 3, "test": 16},
    "cohort": {"training": {"steps": 3, "lr": 0.1, "evaluation_interval": 1000}},
}


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """The directory of the program: the first simulation of a test run fetches it from the tests' cache."""
    directory = run_directory(tmp_path_factory) / "simulated"
    with held(directory.with_suffix(".lock")):
        if not directory.exists():
            settings = read_settings(None, merge(SMALL, {"rounds": 1}))
            compiler = cached_compiler.environment(inference=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(local, "COMPILER", json.loads(compiler["MOBIZO_COMPILER_COMMAND"]))
                for name, value in compiler.items():
                    patch.setenv(name, value)
                simulate(settings, tmp_path_factory.mktemp("first"), Means(engine="inline", program=directory))
    return directory


@pytest.fixture
def run(program, tmp_path):
    """Simulates SMALL with changes, by default in this process; each call in a directory of its own."""
    count = 0

    def simulated(changes=None, directory=None, engine="inline", tell=lambda what, done, of: None, **means):
        nonlocal count
        count += 1
        settings = read_settings(None, merge(SMALL, changes or {}))
        place = directory or tmp_path / f"simulation-{count}"
        return simulate(settings, place, Means(engine=engine, **({"program": program} | means)), tell)

    return simulated


def merge(under, over):
    """`over` in the place of `under`, table by table."""
    both = dict(under)
    for name, value in over.items():
        both[name] = merge(both.get(name, {}), value) if isinstance(value, dict) else value
    return both
