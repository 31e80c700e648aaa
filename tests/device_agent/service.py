"""The real server in processes of its own, with the tiny base and the real compiler, for agents to work with."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from shared.errors import MobizoError
from tests import cached_compiler
from tests.device_agent.native import ROOT

JOB = {
    "base": "tiny",
    "user": "alice",
    "task": "sst2",
    "dataset": "movies",
    "recipe": {  # the program `rademacher` of tests/device_agent/conftest.py, so that both are compiled once
        "estimator": "replay",
        "rank": 2,
        "alpha": 4,
        "queries": 2,
        "effective_batch": 4,
        "sequence_length": 40,
        "answer_length": 6,
    },
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


class Server:
    """A real server that can be stopped and started again at its address."""

    def __init__(self, environment, token, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._environment, self._log = environment, log
        self.url, self.token = f"http://127.0.0.1:{self._port}", token
        self._process = None

    def start(self):
        command = [sys.executable, "-c", "from server.cli.main import main; main()", "run", "--port", str(self._port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )

    def stop(self):
        if self._process is None:
            return
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(60)
        finally:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._process = None


@pytest.fixture(scope="session")
def service(call, environment, base, service_home):
    """A running server that has the tiny base."""
    token = json.loads(call("server", "init", "--json"))["token"]
    call("server", "base", "add", "tiny", str(base), "--json")
    server = Server(environment, token, service_home / "server.log")
    server.start()
    yield server
    server.stop()


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
