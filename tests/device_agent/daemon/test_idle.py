"""What an agent weighs while it has nothing to do, before and after a job."""

import os
import subprocess
import sys

import psutil
import pytest

from tests.device_agent.conftest import ROOT, enroll
from tests.device_agent.fake_server import FakeServer

pytestmark = pytest.mark.usefixtures("with_runner")

MOST_BYTES = 80_000_000


@pytest.fixture
def server(server_key):
    with FakeServer(server_key) as double:
        yield double


@pytest.fixture
def agent(home, server, server_key, dataset):
    enroll(home, server.url, server_key)
    process = subprocess.Popen(
        [sys.executable, "-m", "device_agent", "run", "--data", f"movies={dataset}", "--json"],
        cwd=ROOT,
        env=os.environ | {"MOBIZO_AGENT_HOME": str(home.path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def leases(server):
    return server.calls.count(("POST", "leases"))


def next_lease(server):
    """Waits until the agent has asked for a job once more."""
    before = leases(server)
    server.wait_for(lambda: leases(server) > before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads this process's memory as Linux shows it")
def test_an_idle_agent_is_small_before_and_after_a_job(agent, server, rademacher):
    next_lease(server)
    assert agent.memory_info().rss < MOST_BYTES
    server.add_job(rademacher, steps=2)
    server.wait_for(lambda: server.completions)
    next_lease(server)
    assert agent.memory_info().rss < MOST_BYTES
    assert not agent.children(recursive=True)
    mapped = {entry.path for entry in agent.memory_maps()}
    assert not [path for path in mapped if "torch" in path or "executorch" in path]
