"""The agent against the real server and its real compiler: two programs that know only the contract."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from shared.errors import MobizoError
from shared.lora import load_adapter
from shared.transport import Transport
from tests.device_agent.conftest import ROOT

JOB = {
    "base": "tiny",
    "user": "alice",
    "adapter": "alice-movies",
    "task": "sst2",
    "dataset": "movies",
    "recipe": {"rank": 2, "queries": 2, "effective_batch": 4, "sequence_length": 40},
    "training": {"steps": 12, "evaluation_interval": 5},
}


@pytest.fixture
def environment(tmp_path):
    homes = {"MOBIZO_HOME": str(tmp_path / "server"), "MOBIZO_AGENT_HOME": str(tmp_path / "agent")}
    return os.environ | homes | {"PYTHONWARNINGS": "ignore"}


@pytest.fixture
def call(environment):
    def call(module, *arguments):
        command = [sys.executable, "-c", f"from {module}.cli import main; main()", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.fixture
def server(call, environment, base, tmp_path):
    """(URL, operator's token) of a running server that has the tiny base."""
    token = json.loads(call("server", "init", "--json"))["token"]
    call("server", "bases", "add", "tiny", str(base), "--json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from server.cli import main; main()", "run", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    yield url, token
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until(condition, seconds=240):
    deadline = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except MobizoError:
            pass
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.2)


def test_the_life_of_a_job(server, call, dataset):
    url, token = server
    with Transport(url, token) as transport:

        def ask(method, path, **body):
            return transport.request(method, path, **body).json()

        wait_until(lambda: ask("GET", "/v1/server"))
        once = ask("POST", "/v1/enrolments", json={})["token"]
        call("device_agent", "enroll", "--server", url, "--token", once, "--name", "device-1")
        job = ask("POST", "/v1/jobs", json=JOB)
        wait_until(lambda: ask("GET", f"/v1/jobs/{job['id']}")["state"] not in ("queued", "compiling"))
        call("device_agent", "train", "--once", "--data", f"movies={dataset}")
        job = ask("GET", f"/v1/jobs/{job['id']}")
        assert job["state"] == "succeeded", job
        assert job["result"]["steps"] == 12
        version = ask("GET", "/v1/adapters/alice-movies/versions/1")
        stored = transport.request("GET", "/v1/adapters/alice-movies/versions/1/lora_B.safetensors").content
        assert len(stored) == version["size"] <= 4 * version["size_d"] + 4096
        load_adapter(stored, version["size_d"])
