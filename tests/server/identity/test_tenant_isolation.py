"""A tenant never sees another's things. That each looks as if it were not there: test_matrix.py."""

from tests.server.conftest import job_request


def test_no_job_is_for_a_foreign_device(fleet, device, problem):
    body = job_request(device=device.device_id)
    problem(fleet.app("other").post("/v1/jobs", json=body), 404, "not-found")


def test_a_shared_recipe_shares_nothing_else(fleet, device, lease):
    device.finish(lease)
    stranger = fleet.app("other")
    job = stranger.submit()
    assert job["state"] == "ready"
    assert job["recipe_id"] == lease["job"]["recipe_id"]
    assert [item["id"] for item in stranger.get("/v1/jobs").json()["items"]] == [job["id"]]
    assert stranger.get("/v1/adapters").json()["items"] == []
    device = fleet.device("other")
    assert device.lease()["job"]["id"] == job["id"]
    device.finish(device.lease())
    assert stranger.get("/v1/adapters/alice-movies").json()["versions"] == 1
