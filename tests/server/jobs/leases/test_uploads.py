"""Uploads that are no adapter: each refused clearly, and nothing of them stored."""

import pytest

from shared.canonical import sha256_hex
from shared.zo.lora import HEADER_BYTES
from tests.server.conftest import adapter_bytes, result
from tests.server.homes import at_once
from tests.shared.adapter_fuzz import malformed

SIZE = 2 * 2 * (8 + 4)  # D: two layers, rank 2, q_proj 8 out and v_proj 4 out


def test_a_good_one(home, device, lease):
    data = adapter_bytes(SIZE)
    assert lease["manifest"]["manifest"]["size"] == SIZE
    receipt = device.upload(lease, data)
    assert receipt.status_code == 200
    assert receipt.json() == {"sha256": sha256_hex(data), "size": len(data)}
    assert device.upload(lease, data).json() == receipt.json()
    assert sha256_hex(data) in home.stored_files()


def test_the_last_upload_counts(device, lease, app):
    device.upload(lease, adapter_bytes(SIZE, 1))
    version = device.finish(lease, 2)
    assert version["sha256"] == sha256_hex(adapter_bytes(SIZE, 2))


def test_a_file_that_is_no_adapter_is_refused_and_not_stored(home, app, device, lease, problem):
    before = home.stored_files()
    for name, data in (("empty", b""), ("pickle", b"\x80\x04\x95\x1f"), *malformed(26, SIZE, seed=1)):
        document = problem(device.upload(lease, data), 422, "invalid-upload")
        assert len(document["detail"]) > 20, name
    assert home.stored_files() == before
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"
    assert device.finish(lease)["version"] == 1


@pytest.mark.parametrize("value", [101, -101, 3.4e38])
def test_an_adapter_that_no_training_makes(home, device, lease, problem, value):
    before = home.stored_files()
    document = problem(device.upload(lease, adapter_bytes(SIZE, value)), 422, "invalid-upload")
    assert "root mean square" in document["detail"]
    assert home.stored_files() == before
    assert device.upload(lease, adapter_bytes(SIZE, 99)).status_code == 200


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "multipart/form-data; boundary=x"])
def test_an_upload_that_says_it_is_something_else(home, device, lease, problem, kind):
    before = home.stored_files()
    url, data = f"/v1/leases/{lease['id']}/adapter", adapter_bytes(SIZE)
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


def test_after_completion_only_the_same_again(home, device, lease, problem):
    device.finish(lease)
    before = home.stored_files()
    problem(device.upload(lease, adapter_bytes(SIZE, 9)), 410, "lease-ended")
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
