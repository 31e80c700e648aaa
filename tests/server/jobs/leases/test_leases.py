"""Who gets which job, for how long, and what becomes of it."""

import json
from dataclasses import replace

import pytest

from shared.canonical import sha256_hex
from tests.server.actors import adapter_bytes, result

BEAT = {"phase": "training", "step": 1, "steps": 3}
# What a device says of its lease, by the end of the path; an upload besides.
MESSAGES = {
    "heartbeat": BEAT,
    "release": None,
    "fail": {"code": "x", "detail": "y"},
    "decline": {"needed_bytes": 2, "available_bytes": 1},
    "complete": {"adapter_sha256": "0" * 64, "result": result()},
}


@pytest.fixture
def expire(home):
    """Lets a lease run out; `noticed` as a worker would."""

    def expire(lease, noticed=True):
        home.let_run_out(lease)
        if noticed:
            home.take_back()

    return expire


def state(app, lease):
    return app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"]


def beat(device, lease):
    return device.post(f"/v1/leases/{lease['id']}/heartbeat", json=BEAT)


def assert_refused(problem, device, lease, status, code):
    """Everything that this device says of the lease is refused."""
    problem(device.upload(lease), status, code)
    for name, body in MESSAGES.items():
        problem(device.post(f"/v1/leases/{lease['id']}/{name}", json=body), status, code)


def test_a_lease_has_the_reference_texts_of_its_base(fleet, app, device, standing):
    state = standing[0].state.mobizo
    texts = {"tiny": ("Der Mond dreht sich um die Erde.",), "another": ("La lune tourne autour de la terre.",)}
    fleet.ready_job(app)
    assert "reference_texts" not in device.lease()  # agents of earlier releases do not know the field
    standing[0].state.mobizo = replace(state, settings=state.settings.model_copy(update={"reference_texts": texts}))
    assert device.lease()["reference_texts"] == list(texts["tiny"])


def test_oldest_first_and_only_what_the_device_holds(fleet, app, device):
    first = fleet.ready_job(app, adapter="a1")
    fleet.ready_job(app, adapter="a2", dataset="books")
    assert fleet.device().lease("books")["job"]["request"]["dataset"] == "books"
    assert fleet.device().lease("nothing") is None
    assert fleet.device().lease("nothing", "movies")["job"]["id"] == first["id"]


def test_a_job_for_one_device_waits_for_it(fleet, app, device):
    other = fleet.device(name="other")
    job = fleet.ready_job(app, device=device.device_id)
    assert other.lease() is None
    assert device.lease()["job"]["id"] == job["id"]


def test_a_restarted_agent_gets_its_lease_again(fleet, app, device, lease):
    fleet.ready_job(app, adapter="another")
    again = device.lease()
    assert again["id"] == lease["id"]
    assert again["expires_at"] > lease["expires_at"]
    assert again["job"]["attempts"] == 0


def test_a_lease_on_data_that_is_gone_is_not_given_again(device, lease):
    assert device.lease("something-else") is None


def test_an_expired_lease_frees_the_job(fleet, app, device, lease, expire, problem):
    expire(lease)
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["attempts"]) == ("ready", 1)
    other = fleet.device(name="other")
    next_lease = other.lease()
    assert next_lease["job"]["id"] == lease["job"]["id"]
    assert next_lease["id"] != lease["id"]
    assert_refused(problem, device, lease, 410, "lease-ended")
    assert beat(other, next_lease).status_code == 200


def test_it_is_freed_also_when_no_worker_looks(fleet, app, device, lease, expire):
    expire(lease, noticed=False)
    assert fleet.device(name="other").lease()["job"]["id"] == lease["job"]["id"]


@pytest.mark.parametrize("noticed", [True, False])
def test_a_device_that_was_away_goes_on_if_nobody_took_over(app, device, lease, expire, noticed):
    expire(lease, noticed)
    assert beat(device, lease).status_code == 200
    assert state(app, lease) == "training"


def test_a_device_that_was_away_gets_its_own_job_first(fleet, app, device, lease, expire):
    expire(lease)
    assert device.lease()["id"] == lease["id"]
    assert state(app, lease) == "training"


def test_but_not_once_another_has_had_it(fleet, app, device, lease, expire, problem):
    expire(lease)
    other = fleet.device(name="other")
    next_lease = other.lease()
    other.post(f"/v1/leases/{next_lease['id']}/release")
    problem(beat(device, lease), 410, "lease-ended")
    anew = device.lease()
    assert anew["job"]["id"] == lease["job"]["id"]
    assert anew["id"] not in (lease["id"], next_lease["id"])


def test_work_done_while_away_counts(app, device, lease, expire):
    expire(lease)
    assert device.finish(lease)["version"] == 1
    assert state(app, lease) == "succeeded"


def test_releasing(fleet, app, device, lease, problem):
    url = f"/v1/leases/{lease['id']}/release"
    assert device.post(url).json()["job_state"] == "ready"
    assert device.post(url).json()["job_state"] == "ready"
    problem(beat(device, lease), 410, "lease-ended")
    assert device.lease()["job"]["id"] == lease["job"]["id"]


def test_failing(app, device, lease, problem):
    url, error = f"/v1/leases/{lease['id']}/fail", {"code": "invalid-dataset", "detail": "train.jsonl:3: no label"}
    assert device.post(url, json=error).json()["job_state"] == "failed"
    assert device.post(url, json=error).status_code == 200
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert job["error"] == error
    problem(beat(device, lease), 410, "lease-ended")
    assert device.lease() is None


def test_a_cancelled_job_stops_its_device(app, device, lease, problem):
    app.post(f"/v1/jobs/{lease['job']['id']}/cancel")
    lease_state = beat(device, lease).json()
    assert lease_state["stop"] is True
    assert lease_state["job_state"] == "cancelled"
    problem(device.upload(lease), 410, "lease-ended")
    assert device.post(f"/v1/leases/{lease['id']}/release").json()["stop"] is True
    assert device.lease() is None
    assert state(app, lease) == "cancelled"


def test_completing_twice_counts_once(app, device, lease, problem):
    version = device.finish(lease)
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    url, body = f"/v1/leases/{lease['id']}/complete", {"adapter_sha256": sha256_hex(data), "result": result()}
    assert device.post(url, json=body).json() == version
    assert device.upload(lease, data).json() == {"sha256": sha256_hex(data), "size": len(data)}
    problem(device.post(url, json=body | {"adapter_sha256": "0" * 64}), 409, "conflict")
    problem(beat(device, lease), 410, "lease-ended")
    assert app.get("/v1/adapters/alice-movies").json()["versions"] == 1


def test_completing_needs_the_upload(app, device, lease, problem):
    url = f"/v1/leases/{lease['id']}/complete"
    problem(device.post(url, json={"adapter_sha256": "0" * 64, "result": result()}), 409, "conflict")
    assert device.upload(lease).status_code == 200
    problem(device.post(url, json={"adapter_sha256": "0" * 64, "result": result()}), 409, "conflict")
    assert state(app, lease) == "training"
    assert app.get("/v1/adapters").json()["items"] == []


def test_a_foreign_lease_is_no_lease(fleet, device, lease, problem):
    other = fleet.device(name="other")
    assert_refused(problem, other, lease, 404, "not-found")
    assert beat(device, lease).status_code == 200


def test_files_are_for_devices_that_had_the_job(fleet, app, device, lease, problem):
    other = fleet.device(name="other")
    for file in lease["manifest"]["manifest"]["files"]:
        url = f"/v1/files/{file['sha256']}"
        assert len(device.get(url).content) == file["size"]
        problem(other.get(url), 404, "not-found")
    device.finish(lease)
    assert device.get(url).status_code == 200
    problem(device.get(f"/v1/files/{'0' * 64}"), 404, "not-found")
    problem(device.get("/v1/files/passwd"), 422, "invalid-request")


def test_a_device_that_waits_keeps_its_lease(home, app, device, lease):
    """Hours on battery are no reason to lose the job: heartbeats go on, and one event tells why."""
    waiting = {"phase": "waiting", "step": 1, "steps": 3, "why": "battery at 20 %, the floor is 40 %"}
    for _ in range(3):
        home.let_run_out(lease)
        state = device.post(f"/v1/leases/{lease['id']}/heartbeat", json=waiting).json()
        assert state["job_state"] == "training"
        assert state["expires_at"] > lease["expires_at"]
    home.take_back()
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["progress"]["phase"]) == ("training", "waiting")
    assert job["progress"]["why"] == waiting["why"]
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json=BEAT)
    device.post(f"/v1/leases/{lease['id']}/heartbeat", json=waiting)
    app.post(f"/v1/jobs/{job['id']}/cancel")
    events = app.get(f"/v1/jobs/{job['id']}/events").text.splitlines()
    phases = [json.loads(line[6:])["phase"] for line in events if line.startswith('data: {"phase"')]
    assert phases == ["waiting", "training", "waiting"]
