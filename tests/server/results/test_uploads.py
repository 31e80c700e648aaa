"""Uploads under leases: what is refused, what stays in the store, and what goes at once."""

import pytest

from shared.canonical import sha256_hex
from shared.zo.lora import HEADER_BYTES
from tests.server.actors import adapter_bytes, result
from tests.server.homes import at_once
from tests.shared.adapter_fuzz import malformed

SIZE = 2 * 2 * (8 + 4)  # D: two layers, rank 2, q_proj 8 out and v_proj 4 out


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


def test_a_file_that_is_no_adapter_is_refused_and_not_stored(home, app, device, lease, problem):
    before = home.stored_files()
    for name, data in (("empty", b""), ("pickle", b"\x80\x04\x95\x1f"), *malformed(26, SIZE, seed=1)):
        document = problem(device.upload(lease, data), 422, "invalid-upload")
        assert len(document["detail"]) > 20, name
    assert home.stored_files() == before
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"
    assert device.finish(lease)["version"] == 1


def test_an_adapter_that_no_training_makes(home, device, lease, problem):
    before = home.stored_files()
    for value in (101, -101, 3.4e38):
        document = problem(device.upload(lease, adapter_bytes(SIZE, value)), 422, "invalid-upload")
        assert "root mean square" in document["detail"]
    assert home.stored_files() == before
    assert device.upload(lease, adapter_bytes(SIZE, 99)).status_code == 200


def test_an_upload_that_says_it_is_something_else(home, device, lease, problem):
    before = home.stored_files()
    url, data = f"/v1/leases/{lease['id']}/adapter", adapter_bytes(SIZE)
    for kind in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
        problem(device.put(url, content=data, headers={"Content-Type": kind}), 415, "unsupported-media-type")
    compressed = {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    problem(device.put(url, content=data, headers=compressed), 415, "unsupported-media-type")
    assert home.stored_files() == before


def test_too_large(home, device, lease, problem):
    before = home.stored_files()
    limit = 4 * SIZE + HEADER_BYTES
    problem(device.upload(lease, b"x" * (limit + 1)), 413, "too-large")
    url = f"/v1/leases/{lease['id']}/adapter"
    problem(device.put(url, content=(b"x" * 1000 for _ in range(limit // 1000 + 1))), 413, "too-large")
    problem(device.upload(lease, b"x" * limit), 422, "invalid-upload")
    assert home.stored_files() == before


@pytest.mark.both_databases
def test_sent_many_times_at_once_it_is_stored_once(home, fleet, device, lease):
    """A device that lost the answer sends again, while the first request may still be under way."""
    data = adapter_bytes(SIZE)
    before = home.stored_files()
    actors = [fleet.actor(device.token, device.signer) for _ in range(6)]
    receipts = at_once(*(lambda actor=actor: actor.upload(lease, data) for actor in actors))
    assert [answer.status_code for answer in receipts] == [200] * 6
    assert all(answer.json() == {"sha256": sha256_hex(data), "size": len(data)} for answer in receipts)
    assert sorted(set(home.stored_files()) - set(before)) == [sha256_hex(data)]


def test_two_files_at_once_and_the_one_that_is_named_counts(fleet, app, device, lease):
    files = [adapter_bytes(SIZE, value) for value in (1, 2, 3)]
    pairs = [(fleet.actor(device.token, device.signer), data) for data in files]
    responses = at_once(*(lambda actor=actor, data=data: actor.upload(lease, data) for actor, data in pairs))
    assert [answer.status_code for answer in responses] == [200] * 3

    def complete(actor, data):
        body = {"adapter_sha256": sha256_hex(data), "result": result()}
        return actor.post(f"/v1/leases/{lease['id']}/complete", json=body)

    answers = at_once(*(lambda pair=pair: complete(*pair) for pair in pairs))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert app.get("/v1/adapters/alice-movies").json()["versions"] == 1
