"""The native runner killed with -9: the files are those of an undisturbed run."""

import json
import subprocess

import pytest

from device_agent.engines.child_process import NativeEngine, finish, prepare
from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.engines.runs import recorded_steps

TRAINING = {"steps": 120, "evaluation_interval": 40, "seed": 9}
FILES = ("trajectory.bin", "best.safetensors", "last.safetensors")


@pytest.fixture(params=["rademacher", "stored", "gradient", pytest.param("directional", marks=pytest.mark.slow)])
def plan(request, dataset):
    return request.getfixturevalue(request.param).plan(dataset, **TRAINING)


def begin(path, plan):
    run = RunDirectory(path)
    run.begin(plan)
    return run


@pytest.fixture
def alone(tmp_path, plan, runner_directory):
    """The same run without a kill."""
    run = begin(tmp_path / "alone", plan)
    assert NativeEngine(runner_directory).train(run, lambda _: None, lambda: False).result is not None
    return run


def contents(run):
    return [(run.path / name).read_bytes() for name in FILES]


def reported_steps(output):
    """Steps that a runner told of; its last line may be torn."""
    reports = [json.loads(line).get("progress", {}) for line in output.split(b"\n")[:-1]]
    return [progress["step"] for progress in reports if progress.get("phase") == "training"]


def killed_at(process, step):
    """Kills a runner -9 once it has told of a step; 0: once it lives. Returns the steps that it told of."""
    steps = []
    while max(steps, default=0) < step:
        line = process.stdout.readline()
        assert line, f"the run ended before step {step}"
        steps += reported_steps(line)
    process.kill()
    return steps + reported_steps(process.stdout.read())


def test_a_runner_killed_at_a_step_leaves_the_same_b(tmp_path, plan, alone, runner_directory):
    """Before the first step, about an evaluation, and at the last step, each time by the next runner."""
    run = begin(tmp_path / "run", plan)
    assert prepare(run) is None
    command = [runner_directory / "mobizo-runner", "train", "--attached", "--run", run.path]
    command += ["--program", plan.program, "--weights", plan.weights]
    steps, before = [], b""
    for moment in (0, 1, 2, 39, 40, 41, 90, TRAINING["steps"]):
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            # The runner before may have made steps that it could not tell of any more.
            if recorded_steps(run) < moment or moment == 0:
                steps += killed_at(process, moment)
            else:
                process.kill()
        after = run.ledger.read_bytes() if run.ledger.exists() else b""
        assert after.startswith(before[: parse_trajectory(before)[1]] if before else b"")
        before = after
        assert max(steps, default=0) <= recorded_steps(run)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output = process.stdout.read()
    assert finish(run, TrainerMessage.model_validate_json(output.split(b"\n")[-2])).result is not None
    assert contents(run) == contents(alone)
    steps += reported_steps(output)
    assert steps == sorted(set(steps))
