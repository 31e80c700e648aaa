"""One compiled program of the built-in base, shared by all simulation tests."""

import json

import pytest

from server.programs import local
from simulation.session import Resources, simulate
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
    """Returns the directory of the program, which the first test compiles or takes from the tests' cache."""
    directory = run_directory(tmp_path_factory) / "simulated"
    with held(directory.with_suffix(".lock")):
        if not directory.exists():
            settings = read_settings(None, merge(SMALL, {"rounds": 1}))
            compiler = cached_compiler.environment(inference=False)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(local, "COMPILER", json.loads(compiler["MOBIZO_COMPILER_COMMAND"]))
                for name, value in compiler.items():
                    patch.setenv(name, value)
                simulate(settings, tmp_path_factory.mktemp("first"), Resources(engine="inline", program=directory))
    return directory


@pytest.fixture
def run(program, tmp_path):
    """Returns a function that simulates SMALL with changes, by default in this process and in a new directory."""
    count = 0

    def run_simulation(
        changes=None, directory=None, engine="inline", on_progress=lambda activity, done, total: None, **resources
    ):
        nonlocal count
        count += 1
        settings = read_settings(None, merge(SMALL, changes or {}))
        simulation_directory = directory or tmp_path / f"simulation-{count}"
        return simulate(
            settings, simulation_directory, Resources(engine=engine, **({"program": program} | resources)), on_progress
        )

    return run_simulation


def merge(base, changes):
    """Returns `base` overridden by `changes`, table by table."""
    result = dict(base)
    for name, value in changes.items():
        result[name] = merge(result.get(name, {}), value) if isinstance(value, dict) else value
    return result
