"""A device that the operator shut out: heard no more, and what it trained is another's."""

import threading

import pytest
from sqlalchemy import select

from server.identity.audit import AccessEvent
from tests.server.actors import job_request


@pytest.fixture
def revoke(home):
    def revoke(device):
        home.revoke_device(device.device_id)

    return revoke


def test_its_job_is_another_s(fleet, app, device, lease, revoke, problem):
    revoke(device)
    heartbeat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"})
    assert "revoked" in problem(heartbeat, 401, "unauthorized")["detail"]
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["attempts"]) == ("ready", 1)
    other = fleet.device(name="other")
    next_lease = other.lease()
    assert next_lease["job"]["id"] == job["id"]
    assert other.finish(next_lease)["version"] == 1


def test_jobs_for_it_alone_fail_and_no_more_are_taken(fleet, app, device, revoke, problem):
    running = fleet.ready_job(app, adapter="a1", device=device.device_id)
    assert device.lease()["job"]["id"] == running["id"]
    waiting = app.submit(adapter="a2", device=device.device_id, recipe={"rank": 1})
    other = app.submit(adapter="a3", recipe={"rank": 1})
    revoke(device)
    for job in (running, waiting):
        view = app.get(f"/v1/jobs/{job['id']}").json()
        assert (view["state"], view["error"]["code"]) == ("failed", "device-revoked")
    assert app.get(f"/v1/jobs/{other['id']}").json()["state"] == "queued"
    problem(app.post("/v1/jobs", json=job_request(device=device.device_id)), 404, "not-found")


def test_a_request_that_waits_gets_no_lease(fleet, app, operator, device, revoke):
    answers = []
    body = {"datasets": ["movies"], "wait_seconds": 20}
    waiting = threading.Thread(target=lambda: answers.append(device.post("/v1/leases", json=body)))
    before = operator.get("/v1/devices").json()["items"][0]["last_seen_at"]
    waiting.start()
    while operator.get("/v1/devices").json()["items"][0]["last_seen_at"] == before:
        pass
    revoke(device)
    job = fleet.ready_job(app)
    waiting.join()
    assert answers[0].status_code == 401
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready"


@pytest.mark.both_databases
def test_an_operator_revokes_over_the_api_once(fleet, home, app, operator, device, lease, problem):
    path = f"/v1/devices/{device.device_id}/revoke"
    problem(app.post(path), 403, "forbidden")
    problem(fleet.operator("other").post(path), 404, "not-found")
    first = operator.post(path).json()
    assert first["revoked_at"]
    assert operator.post(path).json() == first
    problem(device.post("/v1/leases", json={"datasets": []}), 401, "unauthorized")
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "ready"
    (entry,) = home.scalars(select(AccessEvent).where(AccessEvent.action == "device-revoked"))
    token = operator.get("/v1/whoami").json()["token_id"]
    assert (entry.tenant, entry.actor, entry.subject, entry.subject_id) == (
        *("default", token, "phone"),
        device.device_id,
    )
