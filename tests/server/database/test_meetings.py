"""Many requests at the same moment about the same things: each counts once, none is lost, and none crashes."""

import pytest
from sqlalchemy import func, select

from server.identity.devices.repository import DeviceRepository
from server.jobs.leases.repository import Ending, JobLease
from server.jobs.leases.service import take_back_overdue
from server.jobs.repository import Job, JobEvent
from server.registry.models import StoredVersion
from shared.canonical import sha256_hex
from tests.server.actors import adapter_bytes, result
from tests.server.conftest import BOTH
from tests.server.homes import at_once

DATABASES = BOTH
DEVICES = 8


def codes(responses):
    return sorted(response.status_code for response in responses)


@pytest.fixture
def devices(fleet):
    return [fleet.device(name=f"phone-{number}") for number in range(DEVICES)]


def assert_whole(home):
    """Events are counted without a gap, and no job has two leases."""
    with home.database.reading() as session:
        for job in session.scalars(select(Job)):
            positions = session.scalars(select(JobEvent.position).where(JobEvent.job_number == job.number)).all()
            assert sorted(positions) == list(range(1, job.events + 1))
        live = select(func.count()).where(JobLease.ending.is_(None)).group_by(JobLease.job_number)
        assert all(count == 1 for count in session.scalars(live))


def test_no_job_is_given_to_two_devices(home, fleet, app, devices):
    fleet.ready_job(app)
    jobs = {app.submit()["id"] for _ in range(DEVICES // 2 - 1)}
    first = at_once(*(device.lease for device in devices))
    # Who looks while another takes the same job may go away empty; a second look finds what is left.
    leases = [device.lease() for device in devices]
    assert all(one is None or one["id"] == other["id"] for one, other in zip(first, leases, strict=True))
    job_ids = [lease["job"]["id"] for lease in leases if lease is not None]
    assert len(job_ids) == len(set(job_ids)) == len(jobs) + 1
    assert_whole(home)


def test_a_device_that_asks_many_times_at_once_gets_one_job(home, fleet, app, device):
    fleet.ready_job(app)
    app.submit()
    actors = [fleet.actor(device.token, device.signer) for _ in range(DEVICES)]
    leases = at_once(*(actor.lease for actor in actors))
    # One is called for each job that waits; the others have waited for nothing.
    assert len({lease["id"] for lease in leases if lease is not None}) == 1
    assert home.scalar(select(func.count()).select_from(JobLease)) == 1
    assert_whole(home)


def test_completed_many_times_at_once_it_is_one_version(home, fleet, app, device, lease):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    assert device.upload(lease, data).status_code == 200
    body = {"adapter_sha256": sha256_hex(data), "result": result()}
    actors = [fleet.actor(device.token, device.signer) for _ in range(DEVICES)]
    url = f"/v1/leases/{lease['id']}/complete"
    answers = at_once(*(lambda actor=actor: actor.post(url, json=body) for actor in actors))
    assert codes(answers) == [200] * DEVICES
    assert len({answer.text for answer in answers}) == 1
    assert home.scalar(select(func.count()).select_from(StoredVersion)) == 1
    assert_whole(home)


def test_versions_of_one_adapter_are_numbered_without_a_gap(home, fleet, app, devices):
    fleet.ready_job(app)
    for _ in devices[1:]:
        app.submit()
    leases = [device.lease() for device in devices]
    versions = at_once(
        *(lambda pair=pair: pair[0].finish(pair[1])["version"] for pair in zip(devices, leases, strict=True))
    )
    assert sorted(versions) == list(range(1, DEVICES + 1))
    assert_whole(home)


@pytest.mark.parametrize("turn", range(2))
def test_cancelled_as_it_completes_it_is_one_of_both(home, fleet, app, device, lease, turn):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    assert device.upload(lease, data).status_code == 200
    body = {"adapter_sha256": sha256_hex(data), "result": result()}
    job = f"/v1/jobs/{lease['job']['id']}"
    completed, cancelled, beat = at_once(
        lambda: device.post(f"/v1/leases/{lease['id']}/complete", json=body),
        lambda: app.post(f"{job}/cancel"),
        lambda: fleet.actor(device.token, device.signer).post(
            f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": 1, "steps": 3}
        ),
    )
    state = app.get(job).json()["state"]
    assert (completed.status_code, cancelled.status_code, state) in {
        (200, 409, "succeeded"),
        (410, 200, "cancelled"),
        (409, 200, "cancelled"),
    }
    assert beat.status_code in (200, 410)
    assert_whole(home)


def test_overdue_leases_are_taken_back_once(home, fleet, app, devices):
    fleet.ready_job(app)
    for _ in devices[1:]:
        app.submit()
    for lease in [device.lease() for device in devices]:
        home.let_run_out(lease)

    def take_back():
        with home.database.writing() as session:
            take_back_overdue(session)

    at_once(*[take_back] * 4, *(device.lease for device in devices))
    take_back()
    with home.database.reading() as session:
        for job in session.scalars(select(Job)):
            expired_leases = select(func.count()).where(
                JobLease.job_number == job.number, JobLease.ending == Ending.EXPIRED
            )
            assert job.attempts <= 1
            assert session.scalar(expired_leases) <= job.attempts
    assert_whole(home)


def test_a_heartbeat_that_revives_a_lease_does_not_wait_for_its_device(home, app, device, lease):
    """Devices are locked before jobs: a message that holds a job's lock does not wait for a device's."""
    if home.settings.database_url is None:
        pytest.skip("SQLite has one lock")
    home.let_run_out(lease)
    home.take_back()
    beat = {"phase": "training", "step": 1, "steps": 3, "loss": 0.5}
    with home.database.writing() as session:
        assert DeviceRepository(session).get("default", device.device_id, lock=True)
        assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=beat, timeout=8).status_code == 200
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"
