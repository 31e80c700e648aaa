"""A lease kept alive beside a run, and training under rules: real processes, and sensors that a test sets."""

import os
from datetime import timedelta

import psutil
import pytest

from device_agent.errors import PolicyForbids, Stopped
from device_agent.jobs.lease_and_policy import LeaseHeartbeat, PolicyGatedRun
from device_agent.jobs.leased_job import Outcome
from device_agent.policy.evaluator import DailyMinutes, PolicyEvaluator
from device_agent.protocol.client import DeviceClient
from shared.errors import Gone, NotFound, Unauthorized
from shared.protocol import LeaseRequest
from shared.rules import QuietHours, Rules
from tests.device_agent.sensing import BATTERY, FINE, METERED, NOON, SettableSensors, degrees
from tests.device_agent.service import wait_until
from tests.device_agent.training.runs import ledger

MOVIES = LeaseRequest(datasets=["movies"])
FOREVER = 40_000  # steps: more than a minute of the native runner


@pytest.fixture
def sensors():
    return SettableSensors()


@pytest.fixture
def start(enrolled, make, sensors, monkeypatch):
    """A daemon in this home, under an owner's rules if they are given as TOML; it looks at its sensors all the time."""
    monkeypatch.setattr("device_agent.jobs.lease_and_policy.CHECK_SECONDS", 0.1)
    monkeypatch.setattr("device_agent.jobs.lease_and_policy.WAIT_SECONDS", 0.05)
    monkeypatch.setattr("device_agent.daemon.daemon.CHECK_SECONDS", 0.05)

    def start(rules=""):
        enrolled.rules.write_text(rules)
        return make(enrolled, sensors=sensors)

    return start


def trainers():
    """Live training processes of this test."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.name() == "mobizo-runner"]


@pytest.mark.slow
def test_a_device_that_warms_goes_slowly_then_waits_then_goes_on(
    start, server, sensors, rademacher, home, in_background
):
    server.add_job(rademacher, steps=2000, evaluation_interval=1000)
    sensors.now = degrees(75)  # five under the ceiling: rests, at full length
    in_background(start("temperature_ceiling = 80.0"))
    server.wait_for(lambda: any(beat.why and "pauses between steps" in beat.why for beat in server.beats))
    assert not any("75" in (beat.why or "") for beat in server.beats)
    sensors.now = degrees(80)
    server.wait_for(lambda: server.beats[-1].phase == "waiting")
    assert "ceiling of 80 °C" in server.beats[-1].why
    assert server.beats[-1].step > 0
    done = ledger(home.run("job-1")).steps
    assert 0 < done < 2000
    assert not trainers()
    assert ("POST", "release") not in server.calls
    sensors.now = degrees(60)
    server.wait_for(lambda: server.completions)


def test_a_rule_of_the_job_holds_and_patience_ends(start, server, sensors, rademacher, home, monkeypatch):
    monkeypatch.setattr("device_agent.jobs.lease_and_policy.PATIENCE_SECONDS", 1.0)
    sensors.now = BATTERY
    server.lease_seconds = 0.8  # so that heartbeats come while it waits
    server.add_job(rademacher, rules=Rules(charging=True), steps=3)
    daemon = start()
    job_end = daemon.run(once=True)
    assert job_end.outcome is Outcome.RELEASED
    assert "on battery; waits for external power" in job_end.detail
    assert job_end.cooldown > 0
    assert ("POST", "release") in server.calls
    assert any(beat.phase == "waiting" and "on battery" in beat.why for beat in server.beats)
    assert home.status().last_detail == job_end.detail
    sensors.now = FINE
    assert daemon.run(once=True).outcome is Outcome.COMPLETED


def test_a_run_that_is_stopped_for_long_is_given_back_and_its_journal_stays(
    start, server, sensors, rademacher, home, monkeypatch, in_background
):
    # Nothing here is waited for: from eleven at night it is seven hours until the day begins.
    monkeypatch.setattr("device_agent.jobs.lease_and_policy.WAIT_SECONDS", 1e6)
    day = QuietHours.model_validate({"start": "06:00", "end": "22:00"})
    server.add_job(rademacher, rules=Rules(hours=(day,)), steps=FOREVER)
    thread, ends = in_background(start(), once=True)
    server.wait_for_training()
    sensors.now = FINE.model_copy(update={"at": NOON.replace(hour=23)})
    thread.join(60)
    assert ends[0].outcome is Outcome.RELEASED
    assert "waits until 06:00; the job is released, the run is kept" in ends[0].detail
    assert ("POST", "release") in server.calls
    assert ledger(home.run("job-1")).steps > 0
    assert not trainers()


def test_a_program_file_that_is_cut_in_use_releases_the_job_which_goes_on_after_a_download(
    start, server, rademacher, home, in_background
):
    server.add_job(rademacher, steps=4000, evaluation_interval=4000)
    daemon, weights = start(), home.cache / rademacher.manifest.file("weights").sha256
    thread, ends = in_background(daemon, once=True)
    server.wait_for(lambda: any(beat.step for beat in server.beats))
    os.truncate(weights, 0)
    thread.join(60)
    assert ends[0].outcome is Outcome.RELEASED
    assert "a file of the program was truncated" in ends[0].detail
    assert server.failures == []
    assert ledger(home.run("job-1")).steps > 0
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    assert weights.stat().st_size == rademacher.manifest.file("weights").size


def test_a_device_that_may_not_train_asks_for_nothing_and_says_why(
    start, server, sensors, rademacher, home, in_background
):
    sensors.now = BATTERY
    server.add_job(rademacher, steps=2)
    daemon = start("charging = true")
    with pytest.raises(PolicyForbids, match="on battery"):
        daemon.run(once=True)
    assert home.status().state == "idle"
    in_background(daemon)
    while home.status().state != "waiting":
        pass
    assert "on battery" in home.status().why
    assert not server.calls
    sensors.now = FINE
    server.wait_for(lambda: server.completions)


def test_a_person_may_say_not_now(start, server, rademacher, home, in_background):
    daemon = start()
    server.add_job(rademacher, steps=FOREVER, evaluation_interval=FOREVER)
    in_background(daemon)
    server.wait_for_training()
    home.paused.touch()
    server.wait_for(lambda: server.beats[-1].phase == "waiting")
    waiting = server.beats[-1]
    assert "paused by the user" in waiting.why
    home.paused.unlink()
    server.wait_for(lambda: server.beats[-1].phase == "training" and server.beats[-1].step > waiting.step)


def test_the_minutes_of_a_day_are_counted_and_kept_to(start, server, rademacher, home):
    server.add_job(rademacher, steps=3)
    daemon = start("daily_minutes = 30")
    assert daemon.run(once=True).outcome is Outcome.COMPLETED
    spent = DailyMinutes(home.budget).spent(NOON.date())
    assert spent > 0
    DailyMinutes(home.budget).add(30, NOON.date())
    with pytest.raises(PolicyForbids, match="30 minutes of training are used up"):
        start("daily_minutes = 30").run(once=True)


def test_the_owners_memory_floor_counts(start, server, sensors, rademacher):
    manifest = rademacher.manifest
    needed = manifest.planned_bytes + manifest.file("weights").size
    sensors.now = FINE.model_copy(update={"available_bytes": needed + 999_999})
    server.add_job(rademacher, steps=1)
    job_end = start("memory_floor_bytes = 1_000_000").run(once=True)
    assert job_end.outcome is Outcome.DECLINED
    assert "besides the 1 MB that the rules reserve" in job_end.detail
    assert server.declines[0].available_bytes == needed - 1
    assert server.declines[0].needed_bytes == needed
    assert server.lease_requests[0].memory_bytes == needed - 1
    assert server.served["downloads"] == 0
    assert not server.failures
    sensors.now = FINE.model_copy(update={"available_bytes": needed + 1_000_000})
    server.add_job(rademacher, steps=1)
    assert start("memory_floor_bytes = 1_000_000").run(once=True).outcome is Outcome.COMPLETED


def test_downloads_wait_for_a_network_that_is_not_metered(start, server, sensors, rademacher, in_background):
    sensors.now = METERED
    server.add_job(rademacher, rules=Rules(metered=False), steps=2)
    in_background(start())
    server.wait_for(lambda: any(beat.phase == "waiting" and "metered" in beat.why for beat in server.beats))
    assert server.served["downloads"] == 0
    sensors.now = FINE
    server.wait_for(lambda: server.completions)


def test_a_link_that_becomes_metered_stops_a_transfer_which_goes_on_later(home, sensors, monkeypatch):
    monkeypatch.setattr("device_agent.jobs.lease_and_policy.CHECK_SECONDS", 0.0)
    evaluator = PolicyEvaluator(Rules(metered=False), sensors, DailyMinutes(home.budget))
    reports, pieces, cuts = [], [], []

    def wait(_seconds):
        sensors.now = FINE
        return False

    policy_run = PolicyGatedRun(evaluator, Rules(), reports.append, lambda: False, wait)

    def move(progress):
        for piece in range(len(pieces), 4):
            if piece == 2 and not cuts:
                cuts.append(piece)
                sensors.now = METERED
            progress(piece, 4)
            pieces.append(piece)
        return "whole"

    assert policy_run.transfer(move) == "whole"
    assert pieces == [0, 1, 2, 3]
    assert [progress.phase for progress in reports].count("waiting") == 1
    sensors.now = METERED
    with pytest.raises(Stopped):  # the daemon is stopped
        PolicyGatedRun(evaluator, Rules(), lambda _: None, lambda: True, lambda _: True).transfer(lambda _: None)


def test_heartbeats_keep_to_the_clock_of_a_server_that_is_hours_ahead(server, rademacher):
    server.ahead, server.lease_seconds = timedelta(hours=7), 0.8
    server.add_job(rademacher)
    with DeviceClient(server.url, "token") as client, LeaseHeartbeat(client, client.lease(MOVIES)):
        server.wait_for(lambda: len(server.beats) > 1)


@pytest.mark.parametrize(
    ("error", "ended"), [(Gone(), "lost"), (NotFound(), "lost"), (Unauthorized(), "refused"), (None, "cancelled")]
)
def test_what_the_server_answers_ends_it(server, rademacher, error, ended):
    server.lease_seconds = 0.8
    server.add_job(rademacher)
    if error is None:
        server.stop.set()
    else:
        server.broken["heartbeat"] = [error]
    with (
        DeviceClient(server.url, "token") as client,
        LeaseHeartbeat(client, client.lease(MOVIES)) as heartbeat,
    ):
        wait_until(lambda: heartbeat.ended is not None)
    assert heartbeat.ended == ended
