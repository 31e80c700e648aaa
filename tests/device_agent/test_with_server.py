"""The agent against the real server and its real compiler: two programs that know only the contract."""

import json
import sqlite3

import pytest

from device_agent.home import AgentHome
from shared.transport import Transport
from tests.device_agent.commands import run_agent
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
    """Enrolls an agent by name, and runs it for one job; returns its home and its output."""

    def agent(name, rules=""):
        home = AgentHome(tmp_path / name)
        token = ask("POST", "/v1/enrollments", json={"users": ["alice"]}).json()["token"]
        call("device_agent", "enroll", "--server", service.url, "--token", token, "--name", name, "--home", home.path)
        home.rules.write_text(rules)
        return home, run_agent(home, "run", "--once", "--data", f"movies={dataset}", "--json").stdout

    return agent


def submit(ask, adapter, trajectory="none", repeat=None, **training):
    """A job whose program is compiled."""
    wait_until(lambda: ask("GET", "/v1/server"))
    own = {"adapter": adapter, "trajectory": trajectory, "repeat": repeat, "training": JOB["training"] | training}
    job = ask("POST", "/v1/jobs", json=JOB | own).json()
    wait_until(lambda: state(ask, job) not in ("queued", "compiling"))
    return job


def state(ask, job):
    return ask("GET", f"/v1/jobs/{job['id']}").json()["state"]


def test_a_trajectory_instead_of_b(ask, agent, service):
    """Trained by the real runtime here, replayed by the server there, to the bit."""
    job = submit(ask, "by-ledger", trajectory="instead", seed=2**53 - 1, steps=2)
    home, output = agent("by-ledger-1", "trajectory = true")
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
def test_a_series_of_three_jobs_trains_a_growing_file_and_leaves_none_of_its_words_at_the_server(
    ask, agent, service_home, dataset, rademacher
):
    train = dataset / "train.jsonl"
    (dataset / "test.jsonl").unlink()
    write_records(dataset / "validation.jsonl", 6, 0, MARKER)
    write_records(train, 9, 1, MARKER)
    job = submit(ask, "weekly", repeat={"every": "7d", "min_new_records": 5}, lr=1e-6, steps=4)
    home, _ = agent("weekly")
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
        run_agent(home, "run", "--once", "--data", f"movies={dataset}")
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
