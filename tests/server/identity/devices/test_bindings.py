"""Users are bound to devices by operators, and a device gets jobs and start weights of its users only."""

import threading

import pytest

from tests.server.actors import adapter_bytes, job_request


def bind(operator, device, user):
    response = operator.put(f"/v1/devices/{device.device_id}/users/{user}")
    assert response.status_code == 200, response.text
    return response.json()["users"]


def unbind(operator, device, user):
    response = operator.delete(f"/v1/devices/{device.device_id}/users/{user}")
    assert response.status_code == 204, response.text


def waiting(app, job):
    return app.get(f"/v1/jobs/{job['id']}/waiting").json()


def published(fleet, app, **changes):
    """A job that a device of its own has trained; the device."""
    device = fleet.device(name="own", users=[changes.get("user", "alice")])
    fleet.ready_job(app, **changes)
    device.finish(device.lease())
    return device


def test_a_device_without_users_gets_no_job(fleet, app, operator):
    stranger = fleet.device(name="stranger", users=[])
    job = fleet.ready_job(app)
    assert stranger.lease() is None
    assert "mobizo device bind DEVICE alice" in waiting(app, job)["why"]
    assert bind(operator, stranger, "alice") == ["alice"]
    assert stranger.lease()["job"]["id"] == job["id"]


def test_a_device_takes_no_job_and_no_start_weights_of_another_user(fleet, app):
    published(fleet, app)
    fleet.ready_job(app, start={"adapter": "alice-movies"})
    stranger = fleet.device(name="stranger", users=["mallory"])
    assert stranger.lease() is None
    assert stranger.get("/v1/devices/self/adapters/alice-movies/main").status_code == 404


def test_another_user_s_job_does_not_carry_start_weights_to_a_device(fleet, app, operator, problem):
    published(fleet, app)
    stranger = fleet.device(name="stranger", users=["mallory"])
    start_request = {"user": "mallory", "adapter": "m", "start": {"adapter": "alice-movies"}}
    problem(app.post("/v1/jobs", json=job_request(**start_request, device=stranger.device_id)), 409, "device-not-bound")
    job = fleet.ready_job(app, **start_request)
    assert stranger.lease() is None
    assert "lacks user 'alice', whose adapter the job starts from" in waiting(app, job)["why"]
    bind(operator, stranger, "alice")
    assert stranger.lease()["start"]["manifest"]["user"] == "alice"


def test_binding_is_idempotent_and_bounded(fleet, operator, device, problem):
    assert bind(operator, device, "bob") == bind(operator, device, "bob") == ["alice", "bob"]
    devices = operator.get("/v1/devices").json()["items"]
    assert [view["users"] for view in devices] == [["alice", "bob"]]
    unbind(operator, device, "bob")
    unbind(operator, device, "bob")
    assert operator.get(f"/v1/devices/{device.device_id}").json()["users"] == ["alice"]
    problem(operator.put(f"/v1/devices/{device.device_id}/users/Bob!"), 422, "invalid-request")
    problem(operator.put("/v1/devices/device_none/users/bob"), 404, "not-found")
    full = fleet.device(name="full", users=[f"user-{number}" for number in range(100)])
    problem(operator.put(f"/v1/devices/{full.device_id}/users/one-more"), 409, "conflict")
    many = {"users": [f"user-{number}" for number in range(101)]}
    problem(operator.post("/v1/enrollments", json=many), 422, "invalid-request")
    problem(operator.post("/v1/enrollments", json={"users": ["a b"]}), 422, "invalid-request")


def test_unbinding_takes_back_a_job_that_is_being_trained(fleet, app, operator, device, problem):
    job = fleet.ready_job(app)
    lease = device.lease()
    bind(operator, device, "bob")
    unbind(operator, device, "bob")  # whose job it is not
    assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"}).status_code == 200
    unbind(operator, device, "alice")
    problem(device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"}), 410, "lease-ended")
    problem(device.upload(lease, adapter_bytes(lease["manifest"]["manifest"]["size"])), 410, "lease-ended")
    problem(device.get(f"/v1/leases/{lease['id']}/start"), 410, "lease-ended")
    assert device.lease() is None
    assert fleet.device(name="tablet").lease()["job"]["id"] == job["id"]


def test_a_lease_that_ran_out_is_not_revived_after_unbinding(fleet, app, operator, device, problem):
    fleet.ready_job(app)
    lease = device.lease()
    fleet.home.let_run_out(lease)
    fleet.home.take_back()
    unbind(operator, device, "alice")
    problem(device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"}), 410, "lease-ended")
    assert device.lease() is None


def test_a_pinned_job_fails_when_its_user_is_unbound(fleet, app, operator, device):
    job = fleet.ready_job(app, device=device.device_id)
    unbind(operator, device, "alice")
    view = app.get(f"/v1/jobs/{job['id']}").json()
    assert (view["state"], view["error"]["code"]) == ("failed", "device-not-bound")


def test_bindings_end_at_the_tenant(fleet, problem):
    foreign, job = fleet.device("other", users=["alice"]), fleet.ready_job(fleet.app())
    assert foreign.lease() is None
    assert waiting(fleet.app(), job)["why"].startswith(
        "no device is enrolled; an operator runs `mobizo device enroll-token --user "
    )
    problem(fleet.operator().put(f"/v1/devices/{foreign.device_id}/users/bob"), 404, "not-found")


@pytest.mark.both_databases
def test_unbinding_and_leasing_at_once_leave_no_lease(fleet, app, operator, device):
    """Whichever comes first, the device has no usable lease in the end."""
    fleet.ready_job(app)
    for _ in range(5):
        bind(operator, device, "alice")
        leases = []
        asking = threading.Thread(target=lambda leases=leases: leases.append(device.lease()))
        asking.start()
        unbind(operator, device, "alice")
        asking.join()
        assert device.lease() is None
        for lease in filter(None, leases):
            beat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"})
            assert beat.status_code == 410, beat.text
    assert {job["state"] for job in app.get("/v1/jobs").json()["items"]} == {"ready"}
