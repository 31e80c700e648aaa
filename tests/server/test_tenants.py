"""A tenant never sees another's things: they look exactly as if they were not there."""

import pytest

from tests.server.conftest import job_request, result


@pytest.fixture
def theirs(fleet, app, device, lease):
    """What tenant `default` owns."""
    device.finish(lease)
    waiting = app.submit(adapter="second")
    return {
        "job": lease["job"]["id"],
        "waiting": waiting["id"],
        "lease": lease["id"],
        "recipe": lease["job"]["recipe_id"],
        "file": lease["manifest"]["manifest"]["files"][0]["sha256"],
        "adapter": "alice-movies",
        "device": device.device_id,
    }


ABSENT = {
    "job": "job_none",
    "waiting": "job_none",
    "lease": "lease_none",
    "recipe": "0" * 64,
    "file": "0" * 64,
    "adapter": "nothing",
}
ROUTES = [
    ("GET", "/v1/jobs/{job}"),
    ("POST", "/v1/jobs/{waiting}/cancel"),
    ("GET", "/v1/jobs/{job}/events"),
    ("GET", "/v1/programs/{recipe}"),
    ("GET", "/v1/files/{file}"),
    ("GET", "/v1/adapters/{adapter}"),
    ("GET", "/v1/adapters/{adapter}/versions/1"),
    ("GET", "/v1/adapters/{adapter}/versions/1/lora_B.safetensors"),
    ("GET", "/v1/adapters/{adapter}/versions/1/peft"),
    ("GET", "/v1/adapters/{adapter}/versions/1/peft/README.md"),
]
DEVICE_ROUTES = [
    ("POST", "/v1/leases/{lease}/heartbeat", {"phase": "training"}),
    ("POST", "/v1/leases/{lease}/fail", {"code": "x", "detail": "y"}),
    ("POST", "/v1/leases/{lease}/release", None),
    ("POST", "/v1/leases/{lease}/decline", {"needed_bytes": 2, "available_bytes": 1}),
    ("POST", "/v1/leases/{lease}/complete", {"adapter_sha256": "0" * 64, "result": result()}),
    ("PUT", "/v1/leases/{lease}/adapter", {}),
    ("GET", "/v1/files/{file}", None),
]


def told(response, names):
    """What an answer tells, without the names that the question held."""
    document = response.json()
    text = document.pop("instance") + document["detail"]
    for name in names.values():
        text = text.replace(name, "?")
    return document | {"detail": text}


def test_every_route_that_takes_a_name(fleet, app, theirs, problem):
    for stranger in (fleet.app("other"), fleet.operator("other")):
        for method, path in ROUTES:
            foreign = stranger.request(method, path.format(**theirs))
            absent = stranger.request(method, path.format(**ABSENT))
            problem(foreign, 404, "not-found")
            assert told(foreign, theirs) == told(absent, ABSENT), path
    assert app.get(f"/v1/jobs/{theirs['waiting']}").json()["state"] == "ready"
    for method, path in ROUTES:
        assert app.request(method, path.format(**theirs)).status_code == 200, path


def test_a_foreign_device(fleet, theirs, problem):
    stranger = fleet.device("other")
    for method, path, body in DEVICE_ROUTES:
        foreign = stranger.request(method, path.format(**theirs), json=body)
        absent = stranger.request(method, path.format(**ABSENT), json=body)
        problem(foreign, 404, "not-found")
        assert told(foreign, theirs) == told(absent, ABSENT), path


def test_lists_are_empty(fleet, theirs):
    stranger = fleet.operator("other")
    for path in ("/v1/jobs", "/v1/adapters", "/v1/devices"):
        assert stranger.get(path).json() == {"items": [], "next": None}


def test_a_foreign_device_gets_no_job_and_no_job_a_foreign_device(fleet, theirs, problem):
    assert fleet.device("other").lease() is None
    stranger = fleet.app("other")
    problem(stranger.post("/v1/jobs", json=job_request(device=theirs["device"])), 404, "not-found")


def test_a_shared_recipe_shares_nothing_else(fleet, theirs):
    stranger = fleet.app("other")
    job = stranger.submit()
    assert job["state"] == "ready"
    assert job["recipe_id"] == theirs["recipe"]
    assert [item["id"] for item in stranger.get("/v1/jobs").json()["items"]] == [job["id"]]
    assert stranger.get("/v1/adapters").json()["items"] == []
    device = fleet.device("other")
    assert device.lease()["job"]["id"] == job["id"]
    device.finish(device.lease())
    assert stranger.get("/v1/adapters/alice-movies").json()["versions"] == 1
