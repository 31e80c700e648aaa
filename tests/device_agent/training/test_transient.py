"""A run in memory is the run on disk: the same bytes to upload, from the same trainer."""

import numpy as np

from device_agent.runtimes import open_runtime
from device_agent.training.prefix import prefix_cache
from device_agent.training.trainer import Trainer
from device_agent.training.transient import InMemoryRun
from shared.zo.lora import dump_adapter, load_adapter
from shared.zo.trajectory import parse_trajectory

SETTINGS = {"steps": 6, "lr": 0.5, "seed": 11, "evaluation_interval": 2}


class CountingRuntime:
    """A runtime that counts the calls of `prefix`."""

    def __init__(self, runtime):
        self.runtime, self.prefixes = runtime, 0

    def __getattr__(self, name):
        self.prefixes += name == "prefix"
        return getattr(self.runtime, name)


def train(run, plan, program, runtime, frozen=None):
    splits = program.splits(plan.dataset, plan.training)
    return Trainer(run, plan, splits, runtime, lambda progress: None, lambda: False, frozen).train()


def opened(plan, **options):
    return open_runtime(plan.manifest, plan.program, plan.weights, **options)


def test_a_run_in_memory_makes_the_bytes_of_a_run_on_disk(run, rademacher, dataset):
    program = rademacher
    plan = program.plan(dataset, **SETTINGS)
    run.begin(plan)
    on_disk = train(run, plan, program, opened(plan))
    transient = InMemoryRun(np.zeros(program.manifest.size, np.float32))
    in_memory = train(transient, plan, program, opened(plan, resident=True))
    assert transient.files == {transient.best: run.best.read_bytes(), transient.last: run.last.read_bytes()}
    assert bytes(transient.ledger_data) == run.ledger.read_bytes()
    assert transient.result == in_memory
    assert in_memory.evaluations == on_disk.evaluations


def test_one_resident_runtime_serves_many_runs_which_do_not_meet(stored, dataset):
    program = stored
    plan = program.plan(dataset, **SETTINGS)
    other = program.plan(dataset, job_id="job-2", **SETTINGS | {"seed": 12})
    zeros = np.zeros(program.manifest.size, np.float32)
    shared, adapters = opened(plan, resident=True), []
    for each in (plan, other, plan):
        transient = InMemoryRun(zeros)
        train(transient, each, program, shared)
        adapters.append(transient.files[transient.last])
    assert adapters[0] == adapters[2] != adapters[1]


def test_runs_that_share_frozen_states_make_the_same_bytes_and_compute_them_once(stored, dataset):
    program = stored
    plan = program.plan(dataset, **SETTINGS)
    zeros = np.zeros(program.manifest.size, np.float32)
    runtime = CountingRuntime(opened(plan, resident=True))
    cache = prefix_cache(runtime, program.manifest, dynamic=plan.dynamic_length)
    ledgers, calls = [], []
    for frozen in (None, cache, cache):
        transient, before = InMemoryRun(zeros), runtime.prefixes
        train(transient, plan, program, runtime, frozen)
        ledgers.append(bytes(transient.ledger_data))
        calls.append(runtime.prefixes - before)
    assert ledgers[0] == ledgers[1] == ledgers[2]
    assert calls[0] == calls[1] > 0 == calls[2]


def test_a_run_in_memory_goes_on_from_what_it_is_given(rademacher, dataset):
    program = rademacher
    plan = program.plan(dataset, **SETTINGS)
    start = np.full(program.manifest.size, 0.01, np.float32)
    transient = InMemoryRun(start)
    train(transient, plan, program, opened(plan))
    trajectory, _ = parse_trajectory(bytes(transient.ledger_data))
    expected = trajectory.replay(start)
    actual = load_adapter(transient.files[transient.last], program.manifest.size)
    np.testing.assert_array_equal(actual, expected)
    assert np.abs(actual - start).max() > 1e-3
    assert dump_adapter(start, {}) not in transient.files.values()
