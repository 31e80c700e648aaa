"""The agent killed with -9 at many moments, from its first word with the server to its last: the same B, once."""

import os
import shutil
import signal

import pytest

from device_agent.inference.adapter_store import AdapterStore
from shared.canonical import sha256_hex
from tests.device_agent.training.runs import recorded_steps

STEPS = 400
SETTINGS = {"steps": STEPS, "evaluation_interval": 50, "seed": 7}
BEFORE, AFTER = ("leases", "files"), ("adapter", "complete")  # what the server hears


@pytest.fixture
def start(start_run):
    """Starts an agent that works on one job."""
    return lambda: start_run("--once")


def more(server, action):
    """Whether the server has heard that again since now."""

    def count():
        return sum(name == action for _, name in server.calls)

    before = count()
    return lambda: count() > before


def kill_when(process, server, condition):
    """Kills the agent at the moment the server, or its ledger, shows that; a run that ends first is left to end."""
    with server.changed:
        while process.poll() is None and not condition():
            server.changed.wait(0.005)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("name", ["rademacher", "gradient"])  # resumed by its ledger, and from checkpoints
def test_killed_at_many_points_it_hands_the_same_b_in_once(request, start, server, home, name):
    program = request.getfixturevalue(name)
    server.add_job(program, **SETTINGS)
    assert start().wait() == 0
    (expected,) = server.uploads
    home.run("job-1").remove()
    shutil.rmtree(home.cache)
    home.create()
    server.completions.clear()
    server.add_job(program, **SETTINGS)
    for action in BEFORE:
        kill_when(start(), server, more(server, action))
    assert recorded_steps(home.run("job-1")) == 0
    kill_when(start(), server, lambda: recorded_steps(home.run("job-1")) >= STEPS // 2)
    assert recorded_steps(home.run("job-1")) >= STEPS // 2
    for action in AFTER:
        kill_when(start(), server, more(server, action))
    start().wait()
    assert recorded_steps(home.run("job-1")) == STEPS
    assert set(server.uploads) == {expected}
    assert len(server.completions) == 1
    assert not server.jobs
    assert home.run("job-1").best.read_bytes() == expected
    # The job may be done with the next word, but the device has its adapter by then.
    (adapter,) = AdapterStore(home).stored()
    assert adapter.sha256 == sha256_hex(expected)
