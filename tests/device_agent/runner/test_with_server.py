"""A runner that one machine built goes through the real server to a device: archive, signature, routes and hashes."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from device_agent.protocol.client import DeviceClient
from device_agent.runner.archive import pack_runner
from device_agent.runner.location import RunnerLocation
from device_agent.runner.supply import ensure_runner
from shared.errors import MobizoError
from shared.signing import new_private_key, parse_public, public_text
from shared.transport import Transport
from tests.device_agent.conftest import ROOT


@pytest.fixture
def environment(tmp_path):
    return os.environ | {"MOBIZO_HOME": str(tmp_path / "server"), "PYTHONWARNINGS": "ignore"}


@pytest.fixture
def call(environment):
    def call(*arguments):
        command = [sys.executable, "-c", "from server.cli.main import main; main()", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.fixture
def server(call, environment, tmp_path):
    """(URL, operator's token) of a running server."""
    token = json.loads(call("init", "--json"))["token"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-c", "from server.cli.main import main; main()", "run", "--port", str(port)]
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    yield f"http://127.0.0.1:{port}", token
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def enrollment(url, token):
    """A one-time token, once the server answers."""
    end = time.monotonic() + 120
    with Transport(url, token) as transport:
        while True:
            try:
                return transport.request("POST", "/v1/enrollments", json={"users": ["alice"]}).json()["token"]
            except MobizoError:
                assert time.monotonic() < end, "the server did not start"


def test_a_device_gets_the_runner_that_the_operator_added(server, call, runner_directory, tmp_path):
    url, token = server
    with DeviceClient(url, enrollment(url, token)) as client:
        grant = client.enroll("device-1", public_text(new_private_key().public_key()))
    place = RunnerLocation.within(tmp_path / "agent")
    archive = tmp_path / "runner.tar.gz"
    pack_runner(runner_directory, archive)
    said = json.loads(subprocess.check_output([runner_directory / "mobizo-runner", "version"]))
    stated = ("--platform", place.system, "--version", said["version"], "--executorch", said["executorch"])
    call("runner-builds", "add", archive, *stated)

    told = []
    with DeviceClient(url, grant.token) as client:
        supply = ensure_runner(place, client, parse_public(grant.server.public_key), told.append)
    assert supply.directory == place.path, supply.reason
    assert [line.split()[0] for line in told] == ["downloading"]
    found = place.path / "mobizo-runner"
    assert found.read_bytes() == (runner_directory / "mobizo-runner").read_bytes()
    assert json.loads(subprocess.check_output([found, "version"], env={})) == said
