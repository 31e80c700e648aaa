"""A run's directory: whole files or none, one process at a time."""

import os

from device_agent.training.run_directory import RunDirectory, prune_runs
from shared.durable import write_durably
from tests.device_agent.warm_starts import RESULT


def test_the_oldest_runs_are_pruned(tmp_path):
    for age in range(5):
        path = tmp_path / f"run-{age}"
        path.mkdir()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "a-file").touch()
    prune_runs(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "run-0", "run-1"]


def test_a_run_that_was_charged_is_kept_until_it_has_a_result(tmp_path):
    runs = [RunDirectory(tmp_path / name) for name in ("paused", "done", "new")]
    for run in runs:
        run.path.mkdir()
        write_durably(run.charge, b"{}")
    runs[1].finish(RESULT)
    runs[2].finish(RESULT)
    for age, run in enumerate(runs):
        os.utime(run.path, (1000 + age, 1000 + age))
    prune_runs(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "paused"]
