"""A run's directory: whole files or none, one process at a time."""

import os
import threading

import numpy as np
import pytest

from device_agent.durable import write_durably
from device_agent.training.journal import RunDirectory, prune_runs
from shared.canonical import file_sha256
from shared.errors import Conflict
from shared.job import Result
from shared.zo.lora import load_adapter

RESULT = Result(
    steps=1, best_step=1, train_seconds=1, seconds=1, peak_rss_bytes=1, train_examples=1, truncated_examples=0
)


def test_a_plan_comes_back_as_it_was(run, rademacher, dataset):
    plan = rademacher.plan(dataset, steps=3)
    run.begin(plan)
    assert run.plan() == plan
    assert run.plan().header == plan.header


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


def test_a_ledger_of_another_seed_is_refused(run, rademacher, dataset):
    run.begin(rademacher.plan(dataset))
    run.open_trajectory(rademacher.plan(dataset, seed=1)).close()
    with pytest.raises(Conflict, match="another run"):
        run.open_trajectory(rademacher.plan(dataset, seed=2))


def test_a_second_process_waits_for_the_first(run, rademacher, dataset):
    run.begin(rademacher.plan(dataset))
    entered = threading.Event()

    def enter():
        with RunDirectory(run.path).lock():
            entered.set()

    with run.lock():
        waiting = threading.Thread(target=enter)
        waiting.start()
        assert not entered.wait(0.2)
    assert entered.wait(10)
    waiting.join()


def test_the_oldest_runs_are_pruned(tmp_path):
    for age in range(5):
        path = tmp_path / f"run-{age}"
        path.mkdir()
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "a-file").touch()
    prune_runs(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-file", "run-0", "run-1"]


def test_durable_writes_replace_and_keep_secrets_private(tmp_path):
    path = tmp_path / "secret"
    write_durably(path, b"one")
    write_durably(path, b"two")
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["secret"]
