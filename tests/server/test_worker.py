"""What the worker process registers."""

from server.worker import create_worker


def test_the_worker_takes_back_leases_as_often_as_the_settings_say(fleet, home, app, device):
    """MOBIZO_LEASE_ATTEMPTS holds in the worker, too."""
    fleet.ready_job(app)
    lease = device.lease()
    home.let_run_out(lease)
    worker = create_worker(home.settings.model_copy(update={"lease_attempts": 1}), home.database)
    worker.register()
    worker.look_around()
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["error"]["code"]) == ("failed", "lost-by-devices")


def test_a_workspace_of_a_dead_worker_is_removed(home):
    worker = create_worker(home.settings, home.database)
    worker.register()
    workspace = home.settings.artifacts_path / "staging" / "worker_dead"
    workspace.mkdir(parents=True)
    (workspace / "half").write_bytes(b"x")
    worker.look_around()
    assert not workspace.exists()
