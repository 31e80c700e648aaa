"""The agent against the real server and its real compiler: two programs that know only the contract."""

import os
import signal
import subprocess

import numpy as np
import pytest

from device_agent.home import AgentHome
from shared.transport import Transport
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.conftest import run_agent, start_agent
from tests.device_agent.service import JOB, wait_until


@pytest.fixture
def ask(service):
    """Asks the server as an app and an operator."""
    with Transport(service.url, service.token) as transport:
        yield lambda method, path, **body: transport.request(method, path, **body)


@pytest.fixture
def agent(call, service, ask, dataset, tmp_path):
    """Enrolls an agent by name, and starts it for one job."""
    processes = []

    def agent(name, rules=""):
        home = AgentHome(tmp_path / name)
        token = ask("POST", "/v1/enrollments", json={"users": ["alice"]}).json()["token"]
        call("device_agent", "enroll", "--server", service.url, "--token", token, "--name", name, "--home", home.path)
        home.rules.write_text(rules)
        command = ("run", "--once", "--data", f"movies={dataset}", "--json")
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
        processes.append(start_agent(home, *command, **options))
        return processes[-1], home

    yield agent
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def submit(ask, adapter, start=None, trajectory="none", **training):
    """A job whose program is compiled."""
    wait_until(lambda: ask("GET", "/v1/server"))
    body = JOB | {"adapter": adapter, "start": start, "trajectory": trajectory, "training": JOB["training"] | training}
    job = ask("POST", "/v1/jobs", json=body).json()
    wait_until(lambda: state(ask, job) not in ("queued", "compiling"))
    return job


def state(ask, job):
    return ask("GET", f"/v1/jobs/{job['id']}").json()["state"]


def training(ask, job):
    return (ask("GET", f"/v1/jobs/{job['id']}").json()["progress"] or {}).get("phase") == "training"


def test_a_trajectory_instead_of_b(ask, agent, service):
    """Trained by the real runtime here, replayed by the server there, to the bit."""
    job = submit(ask, "by-ledger", trajectory="instead", seed=2**53 - 1, steps=2)
    process, home = agent("by-ledger-1", "trajectory = true")
    status, output = process.wait(), process.stdout.read()
    assert status == 0, output
    run = home.run(job["id"])
    assert len(run.trajectory.read_bytes()) < len(run.best.read_bytes())
    version = ask("GET", "/v1/adapters/by-ledger/versions/1").json()
    assert version["verified"] is True
    assert '"verified": true' in output
    path = "/v1/adapters/by-ledger/versions/1"
    assert ask("GET", f"{path}/lora_B.safetensors").content == run.best.read_bytes()
    assert ask("GET", f"{path}/trajectory.bin").content == run.trajectory.read_bytes()
    assert ask("GET", f"{path}/trajectory").json()["steps"] == 2


@pytest.mark.slow
def test_a_job_goes_on_from_a_version_and_another_device_pulls_it(ask, agent, call, service, dataset, tmp_path):
    """Killed in the middle, too; then a device that only uses the adapter pulls both versions."""
    (dataset / "test.jsonl").unlink()  # the best of several validations never falls, so each version is approved
    submit(ask, "lineage", lr=1e-6)  # learns nothing, so that the second version is better on every machine
    assert agent("lineage-1")[0].wait() == 0
    first = ask("GET", "/v1/adapters/lineage/versions/1").json()
    job = submit(ask, "lineage", {"adapter": "lineage"}, steps=6000, evaluation_interval=200, lr=0.1, seed=1)
    process, home = agent("lineage-2")
    wait_until(lambda: training(ask, job))
    os.killpg(process.pid, signal.SIGKILL)
    assert run_agent(home, "run", "--once", "--data", f"movies={dataset}").returncode == 0
    second = ask("GET", "/v1/adapters/lineage/versions/2").json()
    assert second["state"] == "held"  # another device trained version 1, so a person decides
    ask("POST", "/v1/adapters/lineage/versions/2/approve", json={})
    assert second["parent"] == {"adapter": "lineage", "version": 1, "revision": first["revision"]}
    assert second["result"]["zero_shot_accuracy"] is None
    assert second["result"]["start_accuracy"] == first["result"]["tuned_accuracy"]
    run = home.run(job["id"])
    trajectory, _ = parse_trajectory(run.trajectory.read_bytes())
    start = load_adapter(ask("GET", "/v1/adapters/lineage/versions/1/lora_B.safetensors").content, first["size_d"])
    last = load_adapter(run.last.read_bytes(), first["size_d"])
    np.testing.assert_array_equal(trajectory.replay(start), last)

    token = ask("POST", "/v1/enrollments", json={"users": ["bob"]}).json()["token"]
    tablet = AgentHome(tmp_path / "tablet")
    call("device_agent", "enroll", "--server", service.url, "--token", token, "--name", "tablet", "--home", tablet.path)
    pull = ("device_agent", "adapter", "pull", "--home", tablet.path)
    with pytest.raises(AssertionError, match="there is no adapter"):
        call(*pull, "lineage@v1")
    ask("PUT", f"/v1/devices/{tablet.config().device_id}/users/alice")
    assert "version 1" in call(*pull, "lineage@v1")
    assert "version 2" in call(*pull, "lineage@main")
    assert "version 1" in call("device_agent", "adapter", "rollback", "lineage", "--home", tablet.path)
