"""Devices are locked before jobs: a message that holds a job's lock does not wait for a device's."""

from server.identity.devices.repository import DeviceRepository
from tests.server.conftest import job_request

DATABASES = ("postgresql",)
BEAT = {"phase": "training", "step": 1, "steps": 3, "loss": 0.5}


def test_a_heartbeat_that_revives_a_lease_does_not_wait_for_its_device(home, app, device, lease):
    home.let_run_out(lease)
    home.take_back()
    job = app.get("/v1/jobs").json()["items"][0]
    assert job["state"] == "ready"
    with home.database.writing() as session:
        assert DeviceRepository(session).get("default", device.device_id, lock=True)
        assert device.post(f"/v1/leases/{lease['id']}/heartbeat", json=BEAT, timeout=8).status_code == 200
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "training"
    assert app.post("/v1/jobs", json=job_request()).status_code == 202
