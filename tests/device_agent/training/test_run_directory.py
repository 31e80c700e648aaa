"""A run's directory: whole files or none, one process at a time."""

import os

from device_agent.training.run_directory import RunDirectory, prune_runs
from shared.durable import write_durably
from tests.device_agent.warm_starts import RESULT


def test_the_oldest_runs_are_pruned_but_for_one_that_was_charged_and_has_no_result(tmp_path):
    runs = [RunDirectory(tmp_path / name) for name in ("free", "paused", "done", "new", "newest")]
    for run in runs:
        run.path.mkdir()
    for run in runs[1:]:
        write_durably(run.charge, b"{}")
    for run in runs[2:]:
        run.finish(RESULT)
    for age, run in enumerate(runs):
        os.utime(run.path, (1000 + age, 1000 + age))
    (tmp_path / "a-file").touch()
    prune_runs(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "new", "newest", "paused"]
