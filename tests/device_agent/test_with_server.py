"""The agent against the real server and its real compiler: two programs that know only the contract."""

import json
import os
import signal
import sqlite3
import subprocess

import numpy as np
import pytest

from device_agent.home import AgentHome
from shared.transport import Transport
from shared.zo.lora import load_adapter
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.commands import run_agent, start_agent
from tests.device_agent.service import JOB, wait_until
from tests.device_agent.test_privacy import MARKER, forms
from tests.device_agent.tiny import write_records


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


def submit(ask, adapter, start=None, trajectory="none", repeat=None, **training):
    """A job whose program is compiled."""
    wait_until(lambda: ask("GET", "/v1/server"))
    settings = {"start": start, "trajectory": trajectory, "repeat": repeat, "training": JOB["training"] | training}
    body = JOB | {"adapter": adapter} | settings
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


@pytest.mark.slow
def test_a_series_of_three_jobs_trains_a_growing_file_and_leaves_none_of_its_words_at_the_server(
    ask, agent, service_home, dataset, rademacher
):
    train = dataset / "train.jsonl"
    (dataset / "test.jsonl").unlink()
    write_records(dataset / "validation.jsonl", 6, 0, MARKER)
    write_records(train, 9, 1, MARKER)
    job = submit(ask, "weekly", repeat={"every": "7d", "min_new_records": 5}, lr=1e-6, steps=4)
    process, home = agent("weekly")
    assert process.wait() == 0, process.stdout.read()
    for number in (2, 3):
        former = f"/v1/adapters/weekly/versions/{number - 1}"
        if ask("GET", former).json()["state"] == "held":  # whether four steps learn anything depends on the machine
            ask("POST", f"{former}/approve", json={})
        before = train.read_text()
        write_records(train, 6, number, MARKER)
        train.write_text(before + train.read_text())
        with sqlite3.connect(service_home / "server" / "mobizo.sqlite3", timeout=60) as database:  # a week passes
            database.execute("UPDATE jobs SET repeat_at = '2026-01-01 00:00:00' WHERE repeat_at IS NOT NULL")
        wait_until(lambda: ask("GET", "/v1/jobs").json()["items"][0]["state"] == "ready")
        run = run_agent(home, "run", "--once", "--data", f"movies={dataset}")
        assert run.returncode == 0, run.stdout + run.stderr
    ask("POST", f"/v1/jobs/{job['id']}/cancel")

    jobs = [ask("GET", f"/v1/jobs/{each['id']}").json() for each in ask("GET", "/v1/jobs").json()["items"][2::-1]]
    assert [each["series"] for each in jobs] == [job["id"]] * 3
    versions = [ask("GET", f"/v1/adapters/weekly/versions/{number}").json() for number in (1, 2, 3)]
    assert [version["parent"] and version["parent"]["version"] for version in versions] == [None, 1, 2]
    assert [version["result"]["train_examples"] for version in versions] == [9, 15, 21]
    assert ["earlier_accuracy_after" in version["result"] for version in versions] == [False, True, True]

    stored = {path: path.read_bytes() for path in service_home.rglob("*") if path.is_file()}
    for sent in (job["id"].encode(), home.run(jobs[2]["id"]).best.read_bytes()):
        assert any(sent in data for data in stored.values()), "the search must find what was sent"
    words = {piece.encode() for piece in (MARKER, "rich-s", "Z\\u00fcrich")}
    for split in (train, dataset / "validation.jsonl"):
        for line in split.read_text().splitlines():
            words |= set(forms(json.loads(line), rademacher.tokenizer))
    assert [(path, word) for path, data in stored.items() for word in words if word in data] == []
