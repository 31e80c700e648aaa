"""A device without room for a program: another device, or the end, and never the same offer again."""

from datetime import timedelta

import pytest

from server.database.columns import utc_now
from server.jobs.leases.repository import MemoryDecline

# The fake compiler's programs have 256,000 bytes of weights, and plan 16,384 for the tests' recipe.
SMALL = {"needed_bytes": 275_000, "available_bytes": 90_499}  # room for 8-bit weights
TINY = {"needed_bytes": 275_000, "available_bytes": 10_000}  # room for nothing


def decline(device, lease, body=SMALL):
    return device.post(f"/v1/leases/{lease['id']}/decline", json=body)


def view(app, lease):
    return app.get(f"/v1/jobs/{lease['job']['id']}").json()


def test_the_job_waits_for_another_device(fleet, app, device, lease):
    assert decline(device, lease).json()["job_state"] == "ready"
    job = view(app, lease)
    assert job["recipe"] == lease["job"]["recipe"]
    assert "waits for another device" in job["progress"]["why"]
    assert job["attempts"] == 0
    assert device.lease() is None
    assert fleet.device(name="large").lease()["job"]["id"] == lease["job"]["id"]


def test_a_job_for_that_device_alone_fails(fleet, app, device):
    fleet.ready_job(app, device=device.device_id)
    lease = device.lease()
    assert decline(device, lease, TINY).json()["job_state"] == "failed"
    error = view(app, lease)["error"]
    assert error["code"] == "does-not-fit"
    assert "10,000" in error["detail"]
    assert "275,000" in error["detail"]


MOST = 2**63 - 1


@pytest.mark.parametrize(
    ("reported", "needed", "available", "enough"),
    [
        (None, 275_000, 90_499, 275_000),
        (None, 10, 20, 21),  # figures that contradict
        (300_000, 275_000, 200_000, 375_000),  # the job's rules keep 100,000 bytes free, which no request tells
        (None, MOST, 1, MOST),
        (MOST, MOST, 0, MOST),
    ],
)
def test_the_offer_is_made_again_once_there_is_memory(fleet, app, device, reported, needed, available, enough):
    job = fleet.ready_job(app)
    lease = device.lease(memory_bytes=reported)
    assert decline(device, lease, {"needed_bytes": needed, "available_bytes": available}).status_code == 200
    for memory in (0, available, enough - 1):
        assert device.lease(memory_bytes=memory) is None
    assert device.lease(memory_bytes=enough)["job"]["id"] == job["id"]


def test_a_device_that_says_nothing_of_memory_is_asked_again_later(home, device, lease):
    decline(device, lease)
    assert device.lease() is None
    home.change(MemoryDecline, declined_at=utc_now() - timedelta(minutes=59))
    assert device.lease() is None
    home.change(MemoryDecline, declined_at=utc_now() - timedelta(minutes=61))
    assert device.lease()["job"]["id"] == lease["job"]["id"]


def test_other_jobs_of_the_recipe_are_not_offered_either(fleet, app, device, lease):
    decline(device, lease)
    fleet.ready_job(app, adapter="second")
    smaller = fleet.ready_job(app, adapter="third", recipe={"rank": 1})
    assert device.lease()["job"]["id"] == smaller["id"]


def test_said_twice_it_counts_once(device, lease):
    first = decline(device, lease).json()
    again = decline(device, lease, TINY).json()
    assert again == first


def test_what_ended_otherwise_is_not_declined(app, device, lease, problem):
    device.post(f"/v1/leases/{lease['id']}/release")
    problem(decline(device, lease), 410, "lease-ended")
    again = device.lease()
    app.post(f"/v1/jobs/{again['job']['id']}/cancel")
    state = decline(device, again).json()
    assert (state["job_state"], state["stop"]) == ("cancelled", True)


def test_a_lapsed_lease_may_be_declined(home, app, device, lease):
    home.let_run_out(lease)
    assert decline(device, lease).json()["job_state"] == "ready"
    assert device.lease() is None
