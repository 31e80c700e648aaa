"""Rounds of a cohort against the real server: three real agents, both upload forms, and a user who goes on from it."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display
from device_agent.executors.runner import RunnerLauncher
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.jobs.rounds import past_rounds
from shared.capabilities import Capabilities
from shared.federation.secure_aggregation.fixed_point import mean_error
from shared.federation.update import difference
from shared.transport import Transport
from shared.zo.lora import load_adapter
from shared.zo.replay import replay
from shared.zo.trajectory import parse_trajectory
from tests.device_agent.commands import run_agent
from tests.device_agent.service import JOB, wait_until
from tests.device_agent.tiny import write_records

USERS = ("alice", "bob", "carol")
COHORT = {
    "name": "reviews",
    "base": "tiny",
    "task": "sst2",
    "dataset": "movies",
    "recipe": JOB["recipe"],
    "training": {"steps": 4, "lr": 0.2, "seed": 8, "evaluation_interval": 4},
    "algorithm": {"name": "fedprox", "mu": 0.5},
    "quorum": 3,
}


class Agent:
    """A device of its own with its own data, enrolled, whose owner lets it take part."""

    def __init__(self, call, url, ask, directory, user, runner):
        self.home, self.user, self._runner = AgentHome(directory / user), user, runner
        self.data = directory / f"{user}-movies"
        self.data.mkdir(parents=True)
        for split, count in (("train", 9 + 2 * USERS.index(user)), ("validation", 6)):
            write_records(self.data / f"{split}.jsonl", count, seed=USERS.index(user) + 10 * count)
        enrollment_token = ask("POST", "/v1/enrollments", json={"users": [user]}).json()["token"]
        enroll = ("enroll", "--server", url, "--token", enrollment_token, "--name", user, "--home", str(self.home.path))
        call("device_agent", *enroll)
        self.id = self.home.config().device_id

    def work(self, rules):
        """Does the job that waits for it, on the native runner; how it ended."""
        self.home.rules.write_text(rules)
        launcher, data = RunnerLauncher(self._runner), {"movies": self.data}
        options = {"launchers": lambda _manifest: launcher, "capabilities": lambda: Capabilities()}
        with Display(self.home) as display:
            return Daemon(self.home, data, display, **options).run(once=True)


def operator(call, url, name):
    """A tenant's operator's way to ask."""
    output = call("server", "token", "create", "--tenant", name, "--role", "operator", "--json")
    return Transport(url, json.loads(output)["token"])


def open_round(ask):
    """Opens a round and waits until its jobs are there to be had."""
    opened = ask("POST", "/v1/cohorts/reviews/rounds").json()

    def ready():
        jobs = ask("GET", "/v1/jobs?state=ready").json()["items"]
        return len([job for job in jobs if job.get("round", {}).get("number") == opened["number"]]) == len(USERS)

    wait_until(ready)
    return opened["number"]


def finish_round(ask, number):
    """The round once its version is published."""
    path = f"/v1/cohorts/reviews/rounds/{number}"
    wait_until(lambda: ask("GET", path).json()["state"] in ("published", "abandoned"))
    document = ask("GET", path).json()
    assert document["state"] == "published", document
    return document


def version(ask, number):
    """Flat B of a version of the cohort's adapter."""
    about = ask("GET", f"/v1/adapters/reviews/versions/{number}").json()
    data = ask("GET", f"/v1/adapters/reviews/versions/{number}/lora_B.safetensors").content
    return load_adapter(data, about["size_d"])


def run_of(agent, position):
    """What an agent's run in a round left: its ledger, and B after it."""
    past = past_rounds(agent.home.rounds)[position]
    run = agent.home.run(past.job_id)
    trajectory, _ = parse_trajectory(run.trajectory.read_bytes())
    return past, trajectory, load_adapter(run.last.read_bytes(), trajectory.header.size)


def federate(call, url, directory, runner, rounds, rules, **settings):
    """A cohort in a tenant of its own, which is called as its upload form: its agents, ended rounds and versions."""
    form = settings["upload"]
    call("server", "tenant", "create", form)
    with operator(call, url, form) as transport:
        ask = transport.request
        agents = [Agent(call, url, ask, directory / form, user, runner) for user in USERS]
        ask("POST", "/v1/cohorts", json=COHORT | settings)
        for agent in agents:
            ask("PUT", f"/v1/cohorts/reviews/members/{agent.user}", json={"device": agent.id})
        documents = []
        for _ in range(rounds):
            number = open_round(ask)
            with ThreadPoolExecutor() as pool:
                outcomes = {end.outcome for end in pool.map(lambda agent: agent.work(rules), agents)}
            assert outcomes == {Outcome.COMPLETED}
            documents.append(finish_round(ask, number))
        return agents, documents, [version(ask, document["version"]) for document in documents]


@pytest.fixture(scope="module")
def federations(call, service, runner_directory, tmp_path_factory):
    """The same cohort in two tenants: two rounds by weights in the one, one by trajectories in the other."""
    with Transport(service.url) as transport:
        wait_until(lambda: transport.request("GET", "/v1/server"))
    directory = tmp_path_factory.mktemp("federations")
    place = call, service.url, directory, runner_directory
    return {
        "weights": federate(*place, 2, "cohorts = true", upload="weights"),
        "trajectory": federate(*place, 1, 'cohorts = ["reviews"]\ntrajectory = true', upload="trajectory"),
    }


@pytest.mark.slow
def test_both_forms_make_the_same_version_to_the_bit(federations):
    (_, _, weights), (_, _, trajectories) = federations["weights"], federations["trajectory"]
    assert weights[0].any()
    assert weights[0].tobytes() == trajectories[0].tobytes() != weights[1].tobytes()


@pytest.mark.parametrize("form", ["weights", "trajectory"])
def test_a_version_is_the_mean_of_what_the_devices_made(federations, form):
    """Of the B's on the devices' own disks, which the plain replay of their ledgers makes, pulls and all."""
    agents, _, versions = federations[form]
    start = np.zeros_like(versions[0])
    for position, actual in enumerate(versions):
        updates = []
        for agent in agents:
            past, trajectory, last = run_of(agent, position)
            assert past.form == form
            assert len(trajectory.proximal_factors) == 4
            assert replay(trajectory, start).tobytes() == last.tobytes()
            updates.append(difference(last, start).astype(np.float64))
        np.testing.assert_allclose(actual, start + np.mean(updates, axis=0), rtol=1e-6, atol=1e-9)
        start = actual


def test_a_members_device_pulls_the_cohorts_versions_and_no_others(federations):
    home = federations["weights"][0][0].home
    assert "version 1" in run_agent(home, "adapter", "pull", "reviews@v1").stdout
    assert "version 2" in run_agent(home, "adapter", "pull", "reviews@main").stdout
    manifest = AdapterStore(home).stored()[0].origin.manifest
    assert (manifest.version, manifest.cohort.round, manifest.cohort.updates, manifest.device_id) == (2, 2, 3, None)
    assert "there is no adapter" in run_agent(home, "adapter", "pull", "alice-movies@main", status=1).stderr


def test_a_job_of_ones_own_goes_on_from_the_cohort(federations, call, service):
    agents, _, versions = federations["weights"]
    with operator(call, service.url, "weights") as transport:
        ask = transport.request
        body = JOB | {"user": "alice", "adapter": "alice-reviews", "start": {"adapter": "reviews"}}
        body["training"] = {"steps": 2, "evaluation_interval": 1}
        job = ask("POST", "/v1/jobs", json={key: value for key, value in body.items() if key != "recipe"}).json()
        assert agents[0].work("").outcome is Outcome.COMPLETED
        facts = ask("GET", "/v1/adapters/alice-reviews/versions/1").json()
        assert (facts["parent"]["adapter"], facts["parent"]["version"]) == ("reviews", 2)
        trajectory, _ = parse_trajectory(agents[0].home.run(job["id"]).trajectory.read_bytes())
        last = load_adapter(agents[0].home.run(job["id"]).last.read_bytes(), facts["size_d"])
        assert replay(trajectory, versions[1]).tobytes() == last.tobytes()


@pytest.mark.slow
def test_a_masked_round_yields_the_mean_and_tells_of_nobody(call, service, runner_directory, tmp_path, monkeypatch):
    monkeypatch.setattr("device_agent.jobs.secure_aggregation_upload.CHECK_SECONDS", 0.1)
    masked = {"upload": "masked", "masking": {"minimum": 3}, "aggregator": {"name": "mean", "clip_norm": 50.0}}
    place = call, service.url, tmp_path, runner_directory, 1
    agents, (document,), (actual,) = federate(*place, "cohorts = true\nmasked_among = 3", **masked)
    runs = [run_of(agent, 0) for agent in agents]
    parameters = agents[0].home.run(runs[0][0].job_id).plan().round.masking
    mean = np.mean([last for _, _, last in runs], axis=0)
    assert mean.any()
    np.testing.assert_allclose(actual, mean, rtol=1e-6, atol=mean_error(3, 3, parameters))
    assert all(past.form == "masked" and past.bytes > 4 * actual.size for past, _, _ in runs)
    assert (document["updates"], document["start_accuracy"], document["tuned_accuracy"]) == (3, None, None)
