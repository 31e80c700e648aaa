"""The whole life of a job over HTTP."""

from shared.canonical import sha256_hex


def test_submit_lease_train_upload_complete(fleet, app, device):
    job = app.submit()
    assert job["state"] == "queued"
    fleet.home.compile()
    assert app.get(f"/v1/jobs/{job['id']}").json()["state"] == "ready"
    lease = device.lease()
    assert lease["job"]["id"] == job["id"]
    assert lease["job"]["state"] == "training"
    beat = device.post(f"/v1/leases/{lease['id']}/heartbeat", json={"phase": "training", "step": 1, "steps": 3})
    assert beat.json() == {"job_state": "training", "expires_at": beat.json()["expires_at"], "stop": False}
    version = device.finish(lease)
    done = app.get(f"/v1/jobs/{job['id']}").json()
    assert done["state"] == "succeeded"
    assert done["adapter_version"] == version["version"] == 1
    assert done["result"]["tuned_accuracy"] == 0.75
    data = app.get("/v1/adapters/alice-movies/versions/1/lora_B.safetensors").content
    assert sha256_hex(data) == version["sha256"]
