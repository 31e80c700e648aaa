"""Uploads that are no adapter: each refused clearly, and nothing of them stored."""

import json
import struct
import threading

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shared.canonical import sha256_hex
from shared.zo.lora import HEADER_BYTES
from tests.server.conftest import adapter_bytes, result
from tests.shared.adapter_fuzz import malformed

SIZE = 2 * 2 * (8 + 4)  # D: two layers, rank 2, q_proj 8 out and v_proj 4 out


def save(tensors):
    return safetensors.numpy.save(tensors)


def flat(size=SIZE, dtype=np.float32):
    return np.zeros(size, dtype)


def with_value(value):
    values = flat()
    values[SIZE // 2] = value
    return save({"lora_B": values})


def with_header(header, payload):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


BAD = {
    "empty": b"",
    "text": b"not an adapter",
    "nan": with_value(np.nan),
    "infinite": with_value(np.inf),
    "minus infinite": with_value(-np.inf),
    "too short": save({"lora_B": flat(SIZE - 1)}),
    "too long": save({"lora_B": flat(SIZE + 1)}),
    "two-dimensional": save({"lora_B": flat().reshape(2, -1)}),
    "scalar": save({"lora_B": np.zeros((), np.float32)}),
    "half precision": save({"lora_B": flat(dtype=np.float16)}),
    "double": save({"lora_B": flat(dtype=np.float64)}),
    "integers": save({"lora_B": flat(dtype=np.int32)}),
    "another name": save({"lora_A": flat()}),
    "one more tensor": save({"lora_B": flat(), "extra": flat(1)}),
    "no tensor": save({}),
    "torn": adapter_bytes(SIZE)[:-1],
    "torn header": adapter_bytes(SIZE)[:20],
    "more than said": adapter_bytes(SIZE) + b"\0",
    "huge header": struct.pack("<Q", 2**62) + b"{}",
    "offsets beyond the end": with_header(
        {"lora_B": {"dtype": "F32", "shape": [SIZE], "data_offsets": [0, 4 * SIZE]}}, b""
    ),
    "shape over the data": with_header(
        {"lora_B": {"dtype": "F32", "shape": [SIZE], "data_offsets": [0, 4]}}, b"\0" * 4
    ),
    "pickle": b"\x80\x04\x95\x1f\x00\x00\x00\x00\x00\x00\x00",
}


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


def test_every_bad_kind_is_refused_and_nothing_stored(home, app, device, lease, problem):
    before = home.stored_files()
    for name, data in BAD.items():
        document = problem(device.upload(lease, data), 422, "invalid-upload")
        assert len(document["detail"]) > 20, name
    assert home.stored_files() == before
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "training"
    assert device.finish(lease)["version"] == 1


def test_files_that_are_almost_right(home, device, lease, problem):
    before = home.stored_files()
    for _, data in malformed(26, SIZE, seed=1):
        problem(device.upload(lease, data), 422, "invalid-upload")
    assert home.stored_files() == before
    assert device.upload(lease).status_code == 200


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


def test_foreign_and_unknown_leases(fleet, home, device, lease, problem):
    before = home.stored_files()
    other = fleet.device(name="other")
    problem(other.upload(lease, adapter_bytes(SIZE)), 404, "not-found")
    problem(device.put("/v1/leases/lease_none/adapter", content=adapter_bytes(SIZE)), 404, "not-found")
    assert home.stored_files() == before


def test_after_the_lease_nothing_is_taken(home, device, lease, problem):
    before = home.stored_files()
    device.post(f"/v1/leases/{lease['id']}/release")
    problem(device.upload(lease, adapter_bytes(SIZE)), 410, "lease-ended")
    assert home.stored_files() == before


def test_after_completion_only_the_same_again(home, device, lease, problem):
    device.finish(lease)
    before = home.stored_files()
    problem(device.upload(lease, adapter_bytes(SIZE, 9)), 410, "lease-ended")
    assert home.stored_files() == before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=600) | st.integers(0, len(adapter_bytes(SIZE)) - 1).map(lambda n: adapter_bytes(SIZE)[:n]))
def test_random_bytes(home, device, lease, data):
    before = home.stored_files()
    response = device.upload(lease, data)
    assert response.status_code == 422
    assert response.json()["code"] == "invalid-upload"
    assert home.stored_files() == before


def at_once(count, act):
    """What `act(number)` answered to `count` callers that began together."""
    barrier, answers = threading.Barrier(count), []

    def call(number):
        barrier.wait()
        answers.append(act(number))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_sent_many_times_at_once_it_is_stored_once(home, fleet, app, device, lease):
    """A device that lost the answer sends again, while the first request may still be under way."""
    data = adapter_bytes(SIZE)
    before = home.stored_files()
    devices = [fleet.actor(device.token, device.signer) for _ in range(6)]
    receipts = at_once(6, lambda number: devices[number].upload(lease, data))
    assert [answer.status_code for answer in receipts] == [200] * 6
    assert all(answer.json() == {"sha256": sha256_hex(data), "size": len(data)} for answer in receipts)
    assert sorted(set(home.stored_files()) - set(before)) == [sha256_hex(data)]
    url, body = f"/v1/leases/{lease['id']}/complete", {"adapter_sha256": sha256_hex(data), "result": result()}
    versions = at_once(6, lambda number: devices[number].post(url, json=body))
    assert [answer.status_code for answer in versions] == [200] * 6
    assert all(answer.json() == versions[0].json() for answer in versions)
    assert app.get("/v1/adapters/alice-movies").json()["versions"] == 1
    assert app.get(f"/v1/jobs/{lease['job']['id']}").json()["state"] == "succeeded"


def test_two_files_at_once_and_the_one_that_is_named_counts(home, fleet, app, device, lease, problem):
    files = [adapter_bytes(SIZE, value) for value in (1, 2, 3)]
    devices = [fleet.actor(device.token, device.signer) for _ in files]
    assert [answer.status_code for answer in at_once(3, lambda n: devices[n].upload(lease, files[n]))] == [200] * 3
    url = f"/v1/leases/{lease['id']}/complete"
    answers = at_once(
        3, lambda n: devices[n].post(url, json={"adapter_sha256": sha256_hex(files[n]), "result": result()})
    )
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409]
    assert app.get("/v1/adapters/alice-movies").json()["versions"] == 1
