"""A tenant never sees another's things. That each looks as if it were not there: auth/test_matrix.py."""

import pytest

from tests.server.conftest import job_request


@pytest.fixture
def theirs(fleet, app, device, lease):
    """What tenant `default` owns."""
    device.finish(lease)
    app.submit(adapter="second")
    return {
        "recipe": lease["job"]["recipe_id"],
        "device": device.device_id,
    }


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
