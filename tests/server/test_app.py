"""The wiring: what the web process and the workers may load and register, ports, and what a home must have."""

import subprocess
import sys

import pytest

from server.app import create_app
from server.ports import Port
from server.settings import Settings
from server.worker import create_worker
from shared.errors import Unavailable
from tests.server.homes import sweep

HEAVY = ("torch", "executorch", "transformers", "gguf")


@pytest.mark.parametrize("module", ["server.app", "server.worker", "server.serving", "server.cli.main"])
def test_nothing_of_the_model_world_is_imported(module):
    absent = HEAVY if module != "server.worker" else (*HEAVY, "uvicorn")
    script = f"import sys, {module}; print(','.join(m for m in {absent!r} if m in sys.modules))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == ""


def test_a_home_that_was_not_set_up(tmp_path):
    with pytest.raises(Unavailable, match="mobizo-server init"):
        create_app(Settings(home=tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_port_that_was_not_connected():
    port = Port("jobs.nothing")
    with pytest.raises(RuntimeError, match=r"'jobs.nothing' is not connected: call server.wiring.wire"):
        port.get()


def test_a_port_has_one_implementation():
    port = Port("jobs.one")
    port.connect(("first",))
    port.connect(("first",))  # as whoever wires twice does
    with pytest.raises(RuntimeError, match="something else"):
        port.connect(("second",))
    assert port.get() == ("first",)


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
