"""What goes wrong around a device: full disks, revoked tokens, a server away for days, and clocks."""

import shutil
import time

import pytest

from device_agent.datasets.build import Addition, add
from device_agent.datasets.formats import open_source
from device_agent.datasets.splits import SplitRule
from device_agent.datasets.store import DatasetStore
from device_agent.errors import PolicyForbids
from device_agent.home import AgentHome
from device_agent.inference.adapter_store import AdapterStore
from device_agent.jobs.leased_job import Outcome
from device_agent.training.run_directory import RunDirectory
from shared.errors import Gone, Unavailable
from tests.device_agent.fake_server import FakeServer
from tests.device_agent.homes import enroll
from tests.device_agent.sensing import BATTERY, FINE, METERED, SettableSensors, degrees
from tests.device_agent.tiny import write_records
from tests.device_agent.training.runs import fill_disk, ledger

LONG = {"steps": 6000, "evaluation_interval": 3000, "seed": 9}  # heartbeats, twice a second, meet it on fast machines


# --- a full disk


@pytest.fixture
def small_home(small_disk, server, server_key):
    """An enrolled home on a small disk of its own."""
    home = AgentHome(small_disk("100m") / "home")
    home.create()
    enroll(home, server.url, server_key)
    return home


@pytest.fixture
def filler(small_home):
    """A file on the same disk."""
    return small_home.path.parent / "filler"


@pytest.mark.slow
def test_a_disk_that_fills_while_downloading_keeps_what_came(filler, small_home, make, server, rademacher, monkeypatch):
    server.add_job(rademacher, steps=2)
    weights = rademacher.manifest.file("weights")
    send = server.part_of

    def fill_first(content, byte_range):
        if len(content) == weights.size and not filler.exists():
            fill_disk(filler)
        return send(content, byte_range)

    monkeypatch.setattr(server, "part_of", fill_first)
    daemon = make(small_home)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.RELEASED
    assert "the disk is full" in job_end.detail
    monkeypatch.undo()
    filler.unlink()
    assert daemon.run(once=True).outcome is Outcome.COMPLETED


def test_a_full_disk_does_not_cost_a_finished_job_its_upload(filler, small_home, make, server, rademacher):
    server.add_job(rademacher, steps=3)
    server.broken["adapter"] = [Gone()]
    daemon = make(small_home)
    assert daemon.run(once=True).outcome is Outcome.LOST
    fill_disk(filler)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    filler.unlink()
    assert not AdapterStore(small_home).stored()


# --- a token that is not valid any more


@pytest.mark.slow
def test_a_revoked_device_says_so_keeps_its_run_and_goes_on_once_enrolled_again(
    daemon, server, server_key, rademacher, home, in_background, monkeypatch
):
    monkeypatch.setattr("device_agent.daemon.daemon.ENROLLMENT_POLL_SECONDS", 0.05)
    server.add_job(rademacher, **LONG)
    in_background(daemon)
    server.wait_for_training()
    server.revoked = True
    server.wait_for(lambda: server.calls.count(("POST", "leases")) == 2)
    done = ledger(home.run("job-1")).steps
    assert done > 0
    while home.status().state != "refused":
        time.sleep(0.01)
    words = home.status().why
    assert "revoked" in words
    assert "mobizo-agent enroll --server" in words
    assert "\n" not in words
    server.revoked = False
    # Nothing but the new token brings it back before ten minutes are over.
    enroll(home, server.url, server_key, token="another")
    server.wait_for(lambda: server.completions)
    assert server.calls.count(("POST", "leases")) == 3
    assert b"Bearer another" in server.received_bytes
    assert server.completions[0].result.steps == LONG["steps"]


# --- a server that is away


def test_a_server_away_for_days_gets_the_result_when_it_is_back(
    daemon, server, server_key, rademacher, home, in_background, monkeypatch, capsys
):
    for pause in ("upload.PAUSE_SECONDS", "upload.LONGEST_PAUSE_SECONDS", "lease_and_policy.LONGEST_RETRY_SECONDS"):
        monkeypatch.setattr(f"device_agent.jobs.{pause}", 0.02)
    monkeypatch.setattr("shared.transport.time.sleep", lambda _seconds, sleep=time.sleep: sleep(0.001))
    server.add_job(rademacher, steps=3)
    server.broken["adapter"] = [Unavailable()] * 10_000  # however soon the run ends, this server does not get it
    thread, ends = in_background(daemon, once=True)
    server.wait_for(lambda: server.served["downloads"])
    while not home.run("job-1").trajectory.exists():
        time.sleep(0.01)
    port = int(server.url.rpartition(":")[2])
    jobs, files = list(server.jobs), dict(server.files)
    server.close()
    while home.run("job-1").result() is None:
        time.sleep(0.05)
    tries = 0
    while tries < 5:
        time.sleep(0.05)
        tries += capsys.readouterr().out.count("upload failed; retried")
    assert thread.is_alive()
    with FakeServer(server_key, port=port) as new_server:
        new_server.jobs, new_server.files = jobs, files
        thread.join(60)
        assert ends[0].outcome is Outcome.COMPLETED
        assert new_server.uploads == [home.run("job-1").best.read_bytes()]
        assert len(new_server.completions) == 1


# --- data sets that change


def test_a_data_set_that_is_replaced_during_a_job_changes_nothing_of_it(
    make, enrolled, server, rademacher, dataset, monkeypatch
):
    store = DatasetStore(enrolled.data)

    def put(path, mode):
        sources = [open_source(path / "train.jsonl", None, None, None)]
        add(store, Addition(name="own", sources=sources, rule=SplitRule.parse("50/25/25", 0), mode=mode))

    put(dataset, "new")
    begin = RunDirectory.begin

    def replace(self, plan):
        begin(self, plan)
        write_records(dataset / "train.jsonl", 400, seed=5)
        put(dataset, "replace")

    monkeypatch.setattr(RunDirectory, "begin", replace)
    records = store.about("own").records
    server.add_job(rademacher, dataset="own", steps=2)
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    assert server.completions[0].result.train_examples == records["train"]
    assert len(list((store.path / ".versions").iterdir())) == 1


def test_a_run_does_not_go_on_with_another_version_of_its_data_set(
    make, enrolled, server, rademacher, dataset, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(dataset, other)
    server.add_job(rademacher, steps=3)
    run = enrolled.run("job-1")
    run.begin(rademacher.plan(other, steps=3))
    (run.path / "of-the-other-version").touch()
    assert make(enrolled).run(once=True).outcome is Outcome.COMPLETED
    assert not (run.path / "of-the-other-version").exists()


def test_a_job_on_a_data_set_that_was_just_removed_is_released(daemon, server, rademacher, dataset):
    (dataset / "train.jsonl").unlink()
    server.add_job(rademacher, steps=1)
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.RELEASED
    assert "data set 'movies' was removed" in job_end.detail
    assert ("POST", "release") in server.calls
    assert not server.failures


# --- what stays on the device


@pytest.mark.parametrize("readings", [METERED, BATTERY, degrees(81)])
def test_an_inference_file_that_is_missing_fails_no_job_and_waits_for_the_rules_on_network_power_and_heat(
    make, enrolled, server, rademacher, home, readings
):
    home.rules.write_text("metered = false\ncharging = true\ntemperature_ceiling = 80\n")
    sensors = SettableSensors()
    server.add_job(rademacher, steps=1)
    inference = rademacher.manifest.file("inference")
    content = server.files.pop(inference.sha256)
    assert make(enrolled, sensors=sensors).run(once=True).outcome is Outcome.COMPLETED
    server.files[inference.sha256] = content
    sensors.now = readings
    daemon = make(enrolled, sensors=sensors)
    with pytest.raises(PolicyForbids):
        daemon.run(once=True)
    assert not (home.cache / inference.sha256).exists()
    sensors.now = FINE
    assert daemon.run(once=True) is None
    assert (home.cache / inference.sha256).exists()


def test_a_download_for_later_use_stops_when_the_rules_forbid_it_or_the_agent_stops(
    make, enrolled, server, rademacher, home, monkeypatch
):
    monkeypatch.setattr("device_agent.daemon.daemon.CHECK_SECONDS", 0.0)
    home.rules.write_text("charging = true\n")
    sensors = SettableSensors()
    server.add_job(rademacher, steps=1)
    inference = rademacher.manifest.file("inference")
    send, daemon = server.part_of, make(enrolled, sensors=sensors)

    def unplug(content, byte_range):
        if len(content) == inference.size:
            sensors.now = BATTERY
        return send(content, byte_range)

    monkeypatch.setattr(server, "part_of", unplug)
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert not (home.cache / inference.sha256).exists()

    (home.cache / f"{inference.sha256}.part").unlink()
    monkeypatch.setattr(server, "part_of", lambda *arguments: daemon.stop() or send(*arguments))
    sensors.now = FINE
    assert daemon.run().outcome is Outcome.INTERRUPTED
    assert not (home.cache / inference.sha256).exists()
