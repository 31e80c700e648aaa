"""The real server in processes of its own, with the tiny base and the real compiler, for agents to work with."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from shared.errors import MobizoError
from tests import cached_compiler
from tests.device_agent.native import ROOT

RECIPE = {
    "rank": 2,
    "alpha": 4,
    "queries": 2,
    "effective_batch": 4,
    "sequence_length": 40,
    "answer_length": 6,
}
JOB = {
    "base": "tiny",
    "user": "alice",
    "task": "sst2",
    "dataset": "movies",
    "recipe": {"estimator": "replay", **RECIPE},  # the program `rademacher` of tiny.py: both are compiled once
    "training": {"steps": 12, "evaluation_interval": 5},
}


@pytest.fixture(scope="session")
def service_home(tmp_path_factory):
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="session")
def environment(service_home):
    own = {
        "MOBIZO_HOME": str(service_home / "server"),
        "PYTHONWARNINGS": "ignore",
        "MOBIZO_LEASE_SECONDS": "2",
    }
    return os.environ | cached_compiler.environment() | own


@pytest.fixture(scope="session")
def call(environment):
    def call(module, *arguments):
        command = [sys.executable, "-c", f"from {module}.cli.main import main; main()", *arguments]
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    return call


@pytest.fixture(scope="session")
def service(call, environment, base, service_home):
    """The address of a running server that has the tiny base, and a token."""
    token = json.loads(call("server", "init", "--json"))["token"]
    call("server", "base", "add", "tiny", str(base), "--json")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from server.cli.main import main; main()", "run", "--port", str(port)]
    with (service_home / "server.log").open("wb") as log:
        pipes = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", token=token)
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
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
