"""Which job goes to which device, in what order, and why a job waits; over HTTP."""

import threading

import pytest

from shared.job import OWNER_REFUSALS
from tests.server.homes import eventually

NATIVE = {"engines": ["native"], "backends": ["xnnpack", "portable"], "operators": ["mobizo::noise"]}


def waiting(app, job):
    return app.get(f"/v1/jobs/{job['id']}/waiting").json()


def label(operator, device, **labels):
    response = operator.patch(f"/v1/devices/{device.device_id}", json={"labels": labels})
    assert response.status_code == 200, response.text
    return response.json()["labels"]


def test_a_job_goes_only_where_its_labels_are(fleet, app, operator):
    lab, field = fleet.device(name="lab"), fleet.device(name="field")
    label(operator, lab, site="lab")
    job = fleet.ready_job(app, requires={"labels": {"site": "lab"}})
    assert field.lease() is None
    reason = waiting(app, job)["why"]
    assert reason.startswith("none of 2 devices of the user can take it: ")
    assert "lacks label site=lab (1)" in reason
    assert "has not requested a job yet (1)" in reason
    assert lab.lease()["job"]["id"] == job["id"]


def test_labels_are_changed_and_removed(operator, device):
    assert label(operator, device, site="lab", row="2") == {"site": "lab", "row": "2"}
    assert label(operator, device, row=None, shelf="a") == {"site": "lab", "shelf": "a"}
    url = f"/v1/devices/{device.device_id}"
    assert operator.get(url).json()["labels"] == {"site": "lab", "shelf": "a"}


@pytest.mark.parametrize("labels", [{"Site": "lab"}, {"site": "in the lab"}, {"site": ""}, {"": "x"}, {"site": 3}])
def test_bad_labels(operator, device, problem, labels):
    url = f"/v1/devices/{device.device_id}"
    problem(operator.patch(url, json={"labels": labels}), 422, "invalid-request")
    assert operator.get(url).json()["labels"] == {}


def test_a_device_has_at_most_so_many_labels(operator, device, problem):
    label(operator, device, **{f"a{number}": "x" for number in range(32)})
    problem(operator.patch(f"/v1/devices/{device.device_id}", json={"labels": {"b": "x"}}), 400, "bad-request")


def test_what_a_device_tells_is_shown(fleet, operator, device):
    device.lease("movies", "books", memory_bytes=5000, capabilities={"total_bytes": 8000, **NATIVE})
    view = operator.get(f"/v1/devices/{device.device_id}").json()
    assert (view["datasets"], view["memory_bytes"]) == (["movies", "books"], 5000)
    assert view["capabilities"]["total_bytes"] == 8000
    assert view["capabilities"]["operators"] == ["mobizo::noise"]


def test_the_noise_operator_needs_the_native_runner(fleet, app):
    job = fleet.ready_job(app, recipe={"noise": "operator", "estimator": "stored"})
    assert job["state"] == "ready"
    assert fleet.device(name="old").lease() is None
    python = {"engines": ["python"], "backends": ["xnnpack"], "operators": []}
    assert fleet.device(name="python").lease(capabilities=python) is None
    assert fleet.device(name="native").lease(capabilities=NATIVE)["job"]["id"] == job["id"]


def test_a_program_is_offered_where_it_fits(fleet, app, device):
    """The fake compiler's programs take 256,000 bytes of weights and plan 16,384."""
    job = fleet.ready_job(app)
    capabilities = {"backends": ["xnnpack"]}
    assert device.lease(memory_bytes=272_383, capabilities=capabilities) is None
    explanation = waiting(app, job)
    lack = "lacks 272,384 bytes of memory to spare, which its program takes"
    assert explanation["why"] == f"none of 1 devices of the user can take it: {lack} (1)"
    assert (explanation["devices"], explanation["eligible"]) == (1, 0)
    assert device.lease(memory_bytes=272_384, capabilities=capabilities)["job"]["id"] == job["id"]


def test_why_it_waits(fleet, app, device):
    queued = app.submit(adapter="first")
    assert waiting(app, queued)["why"].startswith("its program is waiting to be compiled; ")
    job = fleet.ready_job(app, adapter="second", dataset="books")
    device.lease("films")
    assert waiting(app, job)["why"] == (
        "none of 1 devices of the user can take it: lacks data set 'books' (1); on a device that has the data, "
        "`mobizo-agent data add books FILE` adds the data set"
    )
    device.lease("films", "books", wait_seconds=0)
    assert waiting(app, job)["why"] == "a device is training it"


def test_it_waits_for_its_turn(fleet, app, device):
    lease_job = fleet.ready_job(app, adapter="a")
    assert device.lease("movies")["job"]["id"] == lease_job["id"]
    next_job = fleet.ready_job(app, adapter="b")
    assert waiting(app, next_job)["why"] == "none of 1 devices of the user can take it: is busy (1)"
    device.finish(device.lease("movies"))
    assert waiting(app, next_job)["why"] == "1 of 1 devices of the user can take it when they next request a job"


def order(fleet, app, count):
    """Adapters in the order in which jobs are given out."""
    device = fleet.device(name="worker", users=["alice", "bob", "many", "few", "late"])
    adapters = []
    for _ in range(count):
        lease = device.lease()
        adapters.append(lease["job"]["request"]["adapter"])
        device.finish(lease)
    assert device.lease() is None
    return adapters


def test_users_take_turns(fleet, app):
    for number in range(5):
        app.submit(user="many", adapter=f"m{number}")
    app.submit(user="few", adapter="f0")
    app.submit(user="few", adapter="f1")
    fleet.home.compile()
    assert order(fleet, app, 7) == ["m0", "f0", "m1", "f1", "m2", "m3", "m4"]


def test_who_comes_late_has_missed_nothing(fleet, app):
    for number in range(6):
        app.submit(user="many", adapter=f"m{number}")
    fleet.home.compile()
    device = fleet.device(users=["many"])
    for _ in range(3):
        device.finish(device.lease())
    for number in range(3):
        app.submit(user="late", adapter=f"l{number}")
    assert order(fleet, app, 6) == ["m3", "l0", "m4", "l1", "m5", "l2"]


def test_a_higher_priority_goes_first(fleet, app):
    fleet.ready_job(app, adapter="low")
    fleet.ready_job(app, user="bob", adapter="high", priority=5)
    fleet.ready_job(app, user="bob", adapter="higher", priority=6)
    assert order(fleet, app, 3) == ["higher", "high", "low"]


def test_as_many_devices_are_called_as_there_are_jobs(fleet, app):
    devices = [fleet.device(name=f"d{number}") for number in range(6)]
    leases = []
    threads = [
        threading.Thread(target=lambda device=device: leases.append(device.lease(wait_seconds=30)))
        for device in devices
    ]
    for thread in threads:
        thread.start()
    jobs = []
    for previous_count in (0, 3):  # devices that are not woken keep waiting
        jobs += [fleet.ready_job(app, adapter=f"a{previous_count + number}")["id"] for number in range(3)]
        eventually(lambda count=previous_count: len(leases) >= count + 3)
        assert sorted(lease and lease["job"]["id"] for lease in leases) == sorted(jobs)
    for thread in threads:
        thread.join()


def test_a_device_that_fails_one_job_after_another_rests(home, fleet, app, operator, device):
    for number in range(3):
        fleet.ready_job(app, adapter=f"a{number}")
        lease = device.lease()
        device.post(f"/v1/leases/{lease['id']}/fail", json={"code": "x", "detail": "y"})
    view = operator.get(f"/v1/devices/{device.device_id}").json()
    assert view["failures"] == 3
    assert view["cooldown_until"] is not None
    job = fleet.ready_job(app, adapter="next")
    assert device.lease() is None
    assert waiting(app, job)["why"].endswith("is cooling down after failures (1)")
    assert fleet.device(name="other").lease()["job"]["id"] == job["id"]


def test_an_owner_s_refusal_is_no_failure_of_the_device(fleet, app, operator, device):
    for number, code in enumerate(sorted(OWNER_REFUSALS) * 2):
        fleet.ready_job(app, adapter=f"a{number}")
        device.post(f"/v1/leases/{device.lease()['id']}/fail", json={"code": code, "detail": "y"})
    view = operator.get(f"/v1/devices/{device.device_id}").json()
    assert (view["failures"], view["cooldown_until"]) == (0, None)


def test_success_forgets_failures(fleet, app, operator, device):
    for number in range(2):
        fleet.ready_job(app, adapter=f"a{number}")
        device.post(f"/v1/leases/{device.lease()['id']}/fail", json={"code": "x", "detail": "y"})
    fleet.ready_job(app, adapter="good")
    device.finish(device.lease())
    assert operator.get(f"/v1/devices/{device.device_id}").json()["failures"] == 0


def test_a_job_that_devices_lose_fails_in_the_end(home, fleet, app):
    job = fleet.ready_job(app)
    for number in range(5):
        lease = fleet.device(name=f"d{number}").lease()
        assert lease["job"]["id"] == job["id"]
        home.let_run_out(lease)
    assert fleet.device(name="last").lease() is None
    error = app.get(f"/v1/jobs/{job['id']}").json()["error"]
    assert error["code"] == "lost-by-devices"
    assert "5 times" in error["detail"]


def test_a_device_that_leaves_may_come_back_at_once(home, fleet, app, device, lease):
    state = device.post(f"/v1/leases/{lease['id']}/leave").json()
    assert state["expires_at"] < lease["expires_at"]
    assert fleet.device(name="other").lease() is None
    assert device.lease()["id"] == lease["id"]


def test_a_lease_lasts_as_long_as_the_device_asked_but_no_longer_than_allowed(home, fleet, app, device):
    fleet.ready_job(app)
    lease = device.lease(lease_seconds=1000)
    standard = device.lease(lease_seconds=None)
    longest = device.lease(lease_seconds=1e9)
    assert standard["expires_at"] < lease["expires_at"] < longest["expires_at"]
    beat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training"}).json()
    assert beat["expires_at"] >= longest["expires_at"]
