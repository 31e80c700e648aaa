"""Submitting, reading and cancelling jobs over HTTP."""

import pytest

from shared.job import JobRequest
from tests.server.actors import job_request


def test_a_job_is_accepted(app):
    response = app.post("/v1/jobs", json=job_request())
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/v1/jobs/{job['id']}"
    assert app.get(response.headers["location"]).json() == job
    assert job["state"] == "queued"
    assert job["request"]["adapter"] == "alice-movies"
    assert job["task"]["name"] == "sst2"
    assert job["recipe"]["answer_length"] == 1
    assert job["recipe"]["base"] == {"name": "tiny", "sha256": "b" * 64}
    assert job["attempts"] == 0


@pytest.mark.parametrize(
    ("changes", "eps"),
    [({}, 1e-2), ({"recipe": {"precision": "int8"}}, 5e-2), ({"training": {"eps": 0.125}}, 0.125)],
)
def test_a_job_keeps_the_eps_that_its_precision_has_today(app, changes, eps):
    training = job_request()["training"] | changes.get("training", {})
    if "training" not in changes:
        training.pop("eps", None)
    job = app.post("/v1/jobs", json=job_request(**(changes | {"training": training}))).json()
    assert job["request"]["training"]["eps"] == eps


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"base": "nothing"}, 404, "unknown-base"),
        ({"task": "nothing"}, 422, "invalid-task"),
        ({"recipe": {"rank": 257}}, 422, "invalid-request"),
        ({"recipe": {"sequence_length": 65}}, 422, "invalid-recipe"),
        ({"recipe": {"surprise": 1}}, 422, "invalid-request"),
        ({"training": {"eps": 0}}, 422, "invalid-request"),
        ({"user": "../etc"}, 422, "invalid-request"),
        ({"device": "device_none"}, 404, "not-found"),
        (
            {"task": {"name": "t", "prompt": "{x.y}", "answers": [{"text": "a", "labels": ["a"]}] * 2}},
            422,
            "invalid-request",
        ),
        ({"rules": {"hours": [{"start": "25:00", "end": "06:00"}]}}, 422, "invalid-request"),
        ({"requires": {"executorch": "newest"}}, 422, "invalid-request"),
    ],
)
def test_bad_requests_leave_nothing(app, home, problem, changes, status, code):
    files = home.stored_files()
    problem(app.post("/v1/jobs", json=job_request(**changes)), status, code)
    assert app.get("/v1/jobs").json() == {"items": [], "next": None}
    assert home.stored_files() == files


def test_an_adapter_is_one_user_s(fleet, app, device, problem):
    app.submit()
    problem(app.post("/v1/jobs", json=job_request(user="bob")), 409, "conflict")
    fleet.home.compile()
    device.finish(device.lease())
    problem(app.post("/v1/jobs", json=job_request(user="bob")), 409, "conflict")
    assert app.submit()["state"] == "ready"


def test_cancelling(fleet, app, problem):
    job = app.submit()
    cancelled = app.post(f"/v1/jobs/{job['id']}/cancel").json()
    assert cancelled["state"] == "cancelled"
    assert app.post(f"/v1/jobs/{job['id']}/cancel").json() == cancelled
    fleet.home.compile()
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "cancelled"


def test_what_has_ended_cannot_be_cancelled(fleet, app, device, lease, problem):
    device.finish(lease)
    problem(app.post(f"/v1/jobs/{lease['job']['id']}/cancel"), 409, "conflict")


def test_a_program_can_be_seen_by_who_asked_for_it(fleet, app, problem):
    job = app.submit()
    problem(app.get(f"/v1/programs/{job['recipe_id']}"), 404, "not-found")
    fleet.home.compile()
    signed = app.get(f"/v1/programs/{job['recipe_id']}").json()
    assert signed["manifest"]["recipe_id"] == job["recipe_id"]
    for file in signed["manifest"]["files"]:
        assert len(app.get(f"/v1/files/{file['sha256']}").content) == file["size"]
    problem(fleet.app("other").get(f"/v1/programs/{job['recipe_id']}"), 404, "not-found")


def test_a_job_keeps_its_rules_for_the_device_that_gets_it(fleet, app, device):
    rules = {
        "charging": True,
        "battery_floor": 40.0,
        "temperature_ceiling": 42.5,
        "memory_floor_bytes": 1_000_000,
        "idle": True,
        "hours": [{"start": "22:00:00", "end": "06:00:00"}],
        "metered": False,
        "daily_minutes": 90.0,
    }
    job = fleet.ready_job(app, rules=rules)
    assert job["request"]["rules"] == rules
    lease = device.lease()
    assert lease["job"]["request"] == job["request"]
    plain = app.submit(adapter="plain")["request"]
    assert plain["rules"]["metered"] is True
    assert not any(value for name, value in plain["rules"].items() if name != "metered")


def test_a_request_of_an_earlier_release_is_read():
    assert JobRequest.model_validate(job_request() | {"shrink": False}) == JobRequest.model_validate(job_request())
