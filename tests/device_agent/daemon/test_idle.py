"""What an agent weighs while it has nothing to do, before and after a job."""

import sys

import psutil
import pytest

MAX_BYTES = 80_000_000  # with the pages of the training loop, which runs in this process


def leases(server):
    return server.calls.count(("POST", "leases"))


def next_lease(server):
    """Waits until the agent has asked for a job once more."""
    before = leases(server)
    server.wait_for(lambda: leases(server) > before)


@pytest.mark.skipif(sys.platform != "linux", reason="reads this process's memory as Linux shows it")
def test_an_idle_agent_is_small_before_and_after_a_job(start_run, server, rademacher):
    agent = psutil.Process(start_run().pid)
    next_lease(server)
    assert agent.memory_info().rss < MAX_BYTES
    server.add_job(rademacher, steps=2)
    server.wait_for(lambda: server.completions)
    next_lease(server)
    assert agent.memory_info().rss < MAX_BYTES
    assert not agent.children(recursive=True)
    mapped = {entry.path for entry in agent.memory_maps()}
    assert not [path for path in mapped if "torch" in path or "executorch" in path]
