"""The training process as a process: killed at any step it continues, bit for bit, and never outlives its daemon."""

import os
import signal
import subprocess
import sys

import pytest

from device_agent.training.journal import RunDirectory
from device_agent.training.messages import TrainerMessage
from device_agent.training.trainer_process import ORPHANED
from shared.canonical import file_sha256
from tests.device_agent.conftest import ROOT

STEPS = 60
SETTINGS = {"steps": STEPS, "lr": 0.3, "schedule": "linear", "seed": 3, "evaluation_interval": 7}
KILLS = (1, 41)
ESTIMATORS = ("stored", "directional")


def start(run):
    command = [sys.executable, "-m", "device_agent.training.trainer_process", str(run.path)]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def messages(process):
    for line in process.stdout:
        yield TrainerMessage.model_validate_json(line)


def finish(process):
    """Reads a process to its end; returns its last message and closes its pipes."""
    output = list(messages(process))
    process.wait()
    process.stdin.close()
    process.stdout.close()
    return output


def trained_steps(output):
    return [item.progress.step for item in output if item.progress and item.progress.phase == "training"]


@pytest.mark.parametrize("name", ["rademacher", *(pytest.param(n, marks=pytest.mark.slow) for n in ESTIMATORS)])
def test_killed_at_several_steps_it_ends_with_the_same_b(request, name, dataset, tmp_path):
    plan = request.getfixturevalue(name).plan(dataset, **SETTINGS)
    whole, killed = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "killed")
    whole.begin(plan)
    output = finish(start(whole))
    expected = output[-1].result
    assert trained_steps(output) == list(range(1, STEPS + 1))

    steps = []
    killed.begin(plan)
    for kill in KILLS:
        process = start(killed)
        for message in messages(process):
            steps.extend(trained_steps([message]))
            if message.progress is not None and message.progress.step >= kill:
                os.kill(process.pid, signal.SIGKILL)
                break
        steps.extend(trained_steps(finish(process)))
        assert process.returncode == -signal.SIGKILL
    output = finish(start(killed))
    steps.extend(trained_steps(output))
    assert len(steps) == len(set(steps)), "a step that is in the journal is never computed again"
    assert len(steps) >= STEPS - len(KILLS), "a kill costs at most the word of one step"
    result = output[-1].result
    assert result.evaluations == expected.evaluations
    assert result.best_step == expected.best_step
    for name in ("best.safetensors", "last.safetensors", "trajectory.bin"):
        assert file_sha256(killed.path / name) == file_sha256(whole.path / name)


def test_it_dies_with_its_daemon(rademacher, dataset, run):
    run.begin(rademacher.plan(dataset, steps=100_000))
    process = start(run)
    next(messages(process))
    process.stdin.close()
    assert process.wait(60) == ORPHANED
    process.stdout.close()


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [("{\n" * 1000, "invalid-dataset", "too few of its records"), ("", "runtime-failed", "does not load")],
)
def test_errors_are_its_last_words(rademacher, dataset, run, tmp_path, line, code, words):
    with (dataset / "train.jsonl").open("a") as file:
        file.write(line)
    plan = rademacher.plan(dataset)
    bad = tmp_path / "bad.pte"
    bad.write_bytes(b"bad" * 100)
    run.begin(plan if line else plan.model_copy(update={"program": bad}))
    process = start(run)
    error = finish(process)[-1].error
    assert process.returncode == 0
    assert error.code == code
    assert words in error.detail


def test_it_stops_after_the_step_when_asked(rademacher, dataset, run):
    run.begin(rademacher.plan(dataset, steps=100_000))
    process = start(run)
    for message in messages(process):
        if message.progress is not None and message.progress.phase == "training":
            process.send_signal(signal.SIGINT)  # Ctrl-C is the daemon's to understand
            process.terminate()
            break
    output = finish(process)
    assert output[-1].stopped
    assert process.returncode == 0
