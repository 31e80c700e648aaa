"""The daemon with real training processes against a server that can misbehave."""

import pytest

from device_agent.executors.runner import RunnerLauncher
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.training.run_directory import RunDirectory
from shared.canonical import sha256_hex
from shared.capabilities import Capabilities
from shared.errors import Gone, MobizoError
from shared.key_rotation import sign_key_rotation
from shared.program import ProgramFile
from shared.signing import key_id, new_private_key
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


# --- programs that are not what they should be


def with_file(program, role, **changes):
    files = [
        ProgramFile.model_construct(**(file.model_dump() | changes)) if file.role == role else file
        for file in program.manifest.files
    ]
    return program.manifest.model_copy(update={"files": tuple(files)})


def test_an_older_program_than_one_seen_is_refused(daemon, server, rademacher):
    newer = rademacher.manifest.model_copy(update={"version": 2})
    server.add_job(rademacher, job_id="job-new", manifest=newer, steps=1)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    calls = len(server.calls)
    server.add_job(rademacher, job_id="job-old", steps=1)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    (failure,) = server.failures
    assert failure.code == "untrusted"
    assert "has seen version 2" in failure.detail
    assert "files" not in [action for _, action in server.calls[calls:]]


def test_a_manifest_that_another_server_signed_is_refused(daemon, server, rademacher):
    server.add_job(rademacher, key=new_private_key(), steps=1)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    assert "signature" in job_end.detail
    assert server.failures[0].code == "untrusted"
    assert server.served["downloads"] == 0


def test_a_manifest_that_names_a_path_is_refused(daemon, server, rademacher):
    """As any response that is not valid; tests/shared/test_program.py has the names that are none."""
    server.add_job(rademacher, manifest=with_file(rademacher, "program", name="../../evil"), steps=1)
    with pytest.raises(MobizoError, match="response is not a Lease"):
        daemon.run(once=True)
    assert server.served["downloads"] == 0


@pytest.mark.parametrize("role", ["weights", "program"])
def test_a_file_with_the_right_hash_that_is_no_such_file_fails_the_job(daemon, server, rademacher, role):
    content = bytes(range(256)) * 64
    manifest = with_file(rademacher, role, sha256=sha256_hex(content), size=len(content))
    server.add_job(rademacher, manifest=manifest, steps=1)
    server.files[sha256_hex(content)] = content
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.FAILED
    (failure,) = server.failures
    assert failure.code == "runtime-failed"
    assert "\n" not in failure.detail
    assert not server.uploads


@pytest.mark.slow
def test_a_run_of_another_recipe_is_not_handed_in(daemon, server, rademacher, gaussian, home):
    """A job that returns with a smaller recipe does not accept what was trained with the former one."""
    server.add_job(rademacher, steps=3)
    server.broken["adapter"] = [Gone()]
    assert daemon.run(once=True).outcome is Outcome.LOST
    former = home.run("job-1").best.read_bytes()
    server.jobs.clear()
    server.add_job(gaussian, steps=3)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert server.uploads == [home.run("job-1").best.read_bytes()]
    assert server.uploads != [former]
    assert home.run("job-1").plan().manifest.recipe_id == gaussian.manifest.recipe_id
