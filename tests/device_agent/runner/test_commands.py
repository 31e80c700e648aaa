"""The runner's own commands, as a person or a phone's shell uses them."""

import json
import subprocess
import time

import numpy as np
import pytest

from device_agent.engines.child_process import NativeEngine, prepare
from device_agent.inference.session import open_inference
from shared.zo.trajectory import parse_trajectory

SETTINGS = {"steps": 12, "lr": 0.3, "seed": 3, "evaluation_interval": 4}


@pytest.fixture
def runner(runner_directory):
    def run(*words, **options):
        command = [str(runner_directory / "mobizo-runner"), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)

    return run


@pytest.fixture
def begun(rademacher, dataset, run):
    run.begin(rademacher.plan(dataset, **SETTINGS))
    return run


def files(program, role="program"):
    return ("--program", program.path(role), "--weights", program.path("weights"))


def test_score_measures_what_the_ledger_says(rademacher, begun, runner, runner_directory):
    message = NativeEngine(runner_directory).train(begun, lambda progress: None, lambda: False)
    trajectory, _ = parse_trajectory(begun.ledger.read_bytes())
    adapter = begun.path / "best.f32"
    for split in ("validation", "test"):
        process = runner("score", *files(rademacher), "--run", begun.path, "--adapter", adapter, "--split", split)
        score = json.loads(process.stdout)
        expected = [
            evaluation
            for evaluation in trajectory.evaluations
            if evaluation.split == split and evaluation.step == message.result.best_step
        ]
        assert (score["correct"], score["total"]) == (expected[-1].correct, expected[-1].total)
        assert score["loss"] == expected[-1].loss
    process = runner(
        "score", *files(rademacher), "--run", begun.path, "--adapter", begun.native_plan, "--split", "test"
    )
    assert process.returncode == 1
    assert "does not contain a B of this program" in json.loads(process.stdout)["error"]["detail"]


def test_generate_goes_on_as_python_does(rademacher, runner, tmp_path):
    manifest = rademacher.manifest
    flat = np.random.default_rng(1).normal(0, 0.1, manifest.size).astype("<f4")
    (tmp_path / "b.f32").write_bytes(flat.tobytes())
    inference = open_inference(manifest, rademacher.path("inference"), rademacher.path("weights"))
    inference.load(flat)
    prompt = list(range(3, 49))  # longer than what is read at once
    options = (*files(rademacher, "inference"), "--adapter", tmp_path / "b.f32", "--length", 40)
    tokens = ",".join(map(str, prompt))
    process = runner("generate", *options, "--tokens", tokens, "--most", 9, "--context", manifest.inference_context)
    assert [json.loads(line)["token"] for line in process.stdout.splitlines()] == list(inference.generate(prompt, 9))
    inference.close()
    process = runner("generate", *options, "--tokens", tokens, "--most", 9, "--context", 50)
    assert "do not fit the program's context" in json.loads(process.stdout)["error"]["detail"]


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("fly",),
        ("train", "--program", "p.pte"),
        ("train", "--what"),
        ("generate", "--program", "p", "--weights", "w", "--adapter", "b", "--tokens", "one", "--most", "1"),
    ],
)
def test_options_that_make_no_sense_are_told(runner, words):
    process = runner(*words)
    assert process.returncode == 2
    assert "mobizo-runner train --program" in process.stderr


@pytest.mark.parametrize("harm", ["cut", "flipped", "other", "absent"])
def test_a_plan_that_is_not_whole_is_refused(rademacher, begun, runner, harm):
    assert prepare(begun) is None
    data = begun.native_plan.read_bytes()
    plans = {
        "cut": data[:-30],
        "flipped": data[:200] + bytes([data[200] ^ 1]) + data[201:],
        "other": b"MOBIZO-PLAN 9\n" + data[14:],
        "absent": b"",
    }
    begun.native_plan.write_bytes(plans[harm])
    process = runner("train", *files(rademacher), "--run", begun.path)
    assert process.returncode == 1
    error = json.loads(process.stdout.splitlines()[-1])["error"]
    assert error["code"] == "runtime-failed"
    assert "have the agent write it again" in error["detail"]
    assert not begun.ledger.exists()


def test_attached_it_dies_with_whoever_started_it(rademacher, dataset, run, runner_directory):
    run.begin(rademacher.plan(dataset, **{**SETTINGS, "steps": 20_000, "evaluation_interval": 20_000}))
    assert prepare(run) is None
    command = [runner_directory / "mobizo-runner", "train", *files(rademacher), "--run", run.path, "--attached"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if json.loads(line).get("progress", {}).get("step", 0) >= 2:
                break
        process.stdin.close()
        # What it still says goes nowhere, and must not hold it up.
        process.stdout.close()
        assert process.wait(30) == 3


def test_sigterm_stops_a_pause_too(rademacher, dataset, run, runner_directory):
    run.begin(rademacher.plan(dataset, **SETTINGS))
    assert prepare(run) is None
    (run.path / "limits").write_text("rest 100\nlength 0\n")
    command = [runner_directory / "mobizo-runner", "train", *files(rademacher), "--run", run.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if json.loads(line).get("progress", {}).get("step") == 1:
                break
        time.sleep(0.05)
        process.terminate()
        rest, _ = process.communicate(timeout=30)
    assert json.loads(rest.splitlines()[-1])["stopped"]
