"""Many runs by one program that stays open in one process, as in a simulation: they do not affect each other."""

from device_agent.training.prefix import prefix_cache
from device_agent.training.run_directory import RunDirectory
from tests.device_agent.training.runs import count_calls, hashes, opened, train_in_process

SETTINGS = {"steps": 6, "lr": 0.5, "seed": 11, "evaluation_interval": 2}


def test_runs_that_share_a_program_and_its_frozen_states_make_the_bytes_of_runs_alone(stored, dataset, tmp_path):
    """And compute the states once."""
    plan = stored.plan(dataset, **SETTINGS)
    other = stored.plan(dataset, job_id="job-2", **SETTINGS | {"seed": 12})
    runtime = opened(plan, resident=True)
    made = count_calls(runtime)
    cache = prefix_cache(runtime, stored.manifest, dynamic=plan.dynamic_length)
    results, calls = [], []
    for number, (each, frozen) in enumerate(((plan, None), (other, None), (plan, cache), (plan, cache))):
        run, before = RunDirectory(tmp_path / f"run-{number}"), made["prefix"]
        train_in_process(run, each, stored, runtime=runtime, frozen=frozen)
        results.append(hashes(run))
        calls.append(made["prefix"] - before)
    runtime.close()
    alone = RunDirectory(tmp_path / "alone")
    train_in_process(alone, plan, stored)
    assert hashes(alone) == results[0] == results[2] == results[3] != results[1]
    assert calls[0] == calls[2] > 0 == calls[3]
