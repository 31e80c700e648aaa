"""Uploads under leases: what stays in the store, and what goes at once."""

import pytest

from shared.canonical import sha256_hex
from tests.server.conftest import adapter_bytes, result


@pytest.mark.both_databases
def test_a_replaced_upload_is_removed_at_once(home, device, lease):
    size, before = lease["manifest"]["manifest"]["size"], set(home.stored_files())
    uploads = [adapter_bytes(size, 0.5 + number / 100) for number in range(5)]
    for data in [*uploads, uploads[-1]]:
        assert device.upload(lease, data).status_code == 200
    assert set(home.stored_files()) - before == {sha256_hex(uploads[-1])}
    done = {"adapter_sha256": sha256_hex(uploads[-1]), "result": result()}
    assert device.post(f"/v1/leases/{lease['id']}/complete", json=done).status_code == 200


def test_a_replaced_upload_that_something_else_references_stays(home, fleet, app, device, lease):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    device.finish(lease)
    fleet.ready_job(app)
    again = device.lease()
    assert device.upload(again, data).status_code == 200
    assert device.upload(again, adapter_bytes(again["manifest"]["manifest"]["size"], 0.25)).status_code == 200
    assert sha256_hex(data) in home.stored_files()


def test_a_refused_upload_leaves_nothing(home, fleet, device, lease, problem, monkeypatch):
    """The lease ends between the check of the upload and its record."""
    before = home.stored_files()
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    adopt = home.artifacts.adopt

    def adopt_and_cancel(path, sha256):
        adopt(path, sha256)
        job = lease["job"]["id"]
        fleet.app().post(f"/v1/jobs/{job}/cancel")

    monkeypatch.setattr(home.artifacts, "adopt", adopt_and_cancel)
    problem(device.upload(lease, data), 410, "lease-ended")
    assert home.stored_files() == before
