"""No transaction waits for the store: while it is slow, devices that upload nothing are answered."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from server.storage.directory import DiskArtifacts
from tests.server.actors import JOB, adapter_bytes

PATIENCE = 60
BEAT = {"phase": "training", "step": 1, "steps": 3, "loss": 0.5}


class SlowArtifacts(DiskArtifacts):
    """A store whose writes wait until `resumed` is set."""

    def __init__(self, root):
        super().__init__(root)
        self.waiting, self.resumed = threading.Semaphore(0), threading.Event()

    def _take(self, path, sha256):
        self.waiting.release()
        assert self.resumed.wait(PATIENCE)
        super()._take(path, sha256)


@pytest.fixture
def slow(home, standing, fleet):
    """The server's store, which is slow from now on."""
    store = SlowArtifacts(home.settings.artifacts_path)
    application = standing[0]
    application.state.mobizo = replace(application.state.mobizo, artifacts=store)
    yield store
    store.resumed.set()


def test_a_heartbeat_beside_two_uploads(fleet, app, slow):
    devices = [fleet.device(name=f"device-{number}") for number in range(3)]
    slow.resumed.set()
    leases = []
    for number, device in enumerate(devices):
        fleet.ready_job(app, adapter=f"{JOB['adapter']}-{number}")
        leases.append(device.lease())
    slow.resumed.clear()
    with ThreadPoolExecutor(2) as pool:
        uploads = [
            pool.submit(device.upload, lease, adapter_bytes(lease["manifest"]["manifest"]["size"], value))
            for device, lease, value in zip(devices[:2], leases[:2], (0.5, 0.25), strict=True)
        ]
        try:
            for _ in uploads:
                assert slow.waiting.acquire(timeout=PATIENCE)
            answer = devices[2].post(f"/v1/leases/{leases[2]['id']}/heartbeat", json=BEAT)
            assert answer.status_code == 200, answer.text
            assert not any(upload.done() for upload in uploads)
        finally:
            slow.resumed.set()
        assert [upload.result().status_code for upload in uploads] == [200, 200]
