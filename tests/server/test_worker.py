"""What the worker process registers."""

from server.worker import create_worker
from tests.server.homes import sweep


def test_the_worker_takes_back_leases(fleet, home, app, device, monkeypatch):
    monkeypatch.setattr("server.jobs.leases.service.LEASE_ATTEMPTS", 1)
    fleet.ready_job(app)
    lease = device.lease()
    home.let_run_out(lease)
    worker = create_worker(home.settings, home.database)
    worker.register()
    sweep(worker)
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["error"]["code"]) == ("failed", "lost-by-devices")


def test_a_workspace_of_a_dead_worker_is_removed(home):
    worker = create_worker(home.settings, home.database)
    worker.register()
    workspace = home.settings.artifacts_path / "staging" / "worker_dead"
    workspace.mkdir(parents=True)
    (workspace / "half").write_bytes(b"x")
    sweep(worker)
    assert not workspace.exists()
