"""The daemon with real training processes against a server that can misbehave."""

import pytest

from device_agent.executors.runner import RunnerLauncher
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.training.run_directory import RunDirectory
from shared.capabilities import Capabilities
from shared.errors import Gone
from shared.key_rotation import sign_key_rotation
from shared.signing import key_id, new_private_key
from shared.zo.lora import load_adapter
from tests.device_agent.fake_server import NOW
from tests.device_agent.sensing import BATTERY, SettableSensors

FOREVER = 40_000  # steps: more than a minute of the native runner, whose plan names each of them


@pytest.mark.parametrize("launcher", ["native", "python"], indirect=True)
def test_a_job_from_lease_to_adapter(daemon, server, rademacher, home):
    server.add_job(rademacher, steps=5, evaluation_interval=2)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.COMPLETED
    (completion,) = server.completions
    assert completion.result.steps == 5
    assert completion.result.zero_shot_accuracy is not None
    size = rademacher.manifest.size
    assert len(server.uploads[0]) <= 4 * size + 4096
    load_adapter(server.uploads[0], size)
    run = home.run("job-1")
    assert run.best.read_bytes() == server.uploads[0]
    assert run.last.exists()
    assert server.beats
    assert home.status().last_outcome == "completed"


def test_a_program_of_another_recipe_is_refused(daemon, server, rademacher, gradient):
    server.add_job(rademacher)
    server.add_job(gradient)
    (job, _), (_, signed) = server.jobs
    server.jobs[:] = [(job, signed)]
    assert daemon.run(once=True).outcome is Outcome.FAILED
    assert "has another recipe than the job" in server.failures[0].detail


def test_a_cancelled_job_is_forgotten(daemon, server, rademacher, home, in_background):
    server.add_job(rademacher, steps=FOREVER)
    thread, result = in_background(daemon, once=True)
    server.wait_for_training()
    server.stop.set()
    thread.join(60)
    assert result[0].outcome is Outcome.CANCELLED
    assert not home.run("job-1").path.exists()


def test_stopping_the_daemon_keeps_lease_and_journal(daemon, server, rademacher, home, in_background):
    server.add_job(rademacher, steps=FOREVER)
    thread, _ = in_background(daemon)
    server.wait_for_training()
    daemon.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert home.status().last_outcome == "interrupted"
    assert ("POST", "release") not in server.calls
    assert ("POST", "leave") in server.calls
    assert (home.run("job-1").path / "trajectory.bin").exists()


@pytest.mark.parametrize(("rule", "cohorts"), [("false", False), ("true", True), ('["reviews"]', ("reviews",))])
def test_the_server_is_told_what_the_device_can_do_and_whose_rounds_its_owner_allows(
    enrolled, make, server, rule, cohorts
):
    enrolled.rules.write_text(f"cohorts = {rule}\n")
    can = Capabilities(engines=("python",), backends=("xnnpack",), operators=())
    make(enrolled, sensors=SettableSensors(BATTERY), capabilities=lambda: can).run(once=True)
    power = {"battery": True, "charging": False, "battery_percent": 80}
    assert server.lease_requests[0].capabilities == can.model_copy(update=power | {"cohorts": cohorts})


def test_a_refused_upload_keeps_the_result_for_when_the_job_comes_back(daemon, server, rademacher, home):
    server.add_job(rademacher, steps=3)
    server.broken["adapter"] = [Gone()]
    assert daemon.run(once=True).outcome is Outcome.LOST
    calls = len(server.calls)
    best = home.run("job-1").best.read_bytes()
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert server.uploads == [best]
    # The inference file comes after; the training files were not asked for again.
    assert [action for _, action in server.calls[calls:]].count("files") == 1


def test_an_executor_that_dies_releases_the_job_and_does_not_end_the_daemon(
    make, enrolled, server, rademacher, tmp_path
):
    runner = tmp_path / "mobizo-runner"
    runner.write_text("#!/bin/sh\necho SECRET >&2\nexit 7\n")
    runner.chmod(0o755)
    server.add_job(rademacher, steps=1)
    job_end = make(enrolled, launchers=lambda _manifest: RunnerLauncher(tmp_path)).run(once=True)
    assert job_end.outcome is Outcome.RELEASED
    assert job_end.detail == "the executor ended with status 7: SECRET"
    assert job_end.cooldown > 0
    assert ("POST", "release") in server.calls
    assert b"SECRET" not in server.received_bytes
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED


def test_an_error_nobody_foresaw_is_reported_by_its_kind_alone(daemon, server, rademacher, monkeypatch):
    def surprise(self):
        raise ZeroDivisionError("SECRET")

    monkeypatch.setattr(RunDirectory, "result", surprise)
    server.add_job(rademacher, steps=1)
    assert daemon.run(once=True).outcome is Outcome.FAILED
    assert "ZeroDivisionError" in server.failures[0].detail
    assert b"SECRET" not in server.received_bytes


def hand_over(server):
    """The server signs with a new key from now on, to which its former one handed over."""
    following = new_private_key()
    server.rotations.append(sign_key_rotation(server.key, following.public_key(), NOW))
    server.key = following


def test_a_server_whose_key_handed_over_is_followed_and_what_was_kept_before_stays_usable(
    daemon, server, home, rademacher
):
    server.add_job(rademacher, steps=1)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    before = home.config()
    for _ in range(2):
        hand_over(server)
    server.add_job(rademacher, job_id="job-2", steps=1)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    config = home.config()
    assert config.key_id == key_id(server.key.public_key()) != before.key_id
    assert config.former_keys[0] == before.public_key
    store = AdapterStore(home)
    assert store.open("alice-movies", *config.trusted_keys()).about.job_id == "job-2"
    store.rollback("alice-movies")
    assert store.open("alice-movies", *config.trusted_keys()).about.job_id == "job-1"
