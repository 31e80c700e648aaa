"""A run's directory: whole files or none, one process at a time."""

import os

import numpy as np

from device_agent.durable import write_durably
from device_agent.training.run_directory import RunDirectory, prune_runs
from shared.canonical import file_sha256
from shared.job import Result
from shared.zo.lora import load_adapter

RESULT = Result(
    steps=1, best_step=1, train_seconds=1, seconds=1, peak_rss_bytes=1, train_examples=1, truncated_examples=0
)


def test_equal_adapters_are_equal_files_of_allowed_size(run, rademacher, dataset):
    plan = rademacher.plan(dataset)
    run.begin(plan)
    flat = np.arange(plan.manifest.size, dtype=np.float32)
    hashes = set()
    for _ in range(3):
        run.write_adapter(run.best, flat, plan, 7)
        hashes.add(file_sha256(run.best))
    assert len(hashes) == 1
    assert run.best.stat().st_size <= 4 * flat.size + 4096
    np.testing.assert_array_equal(load_adapter(run.best.read_bytes(), flat.size), flat)


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
