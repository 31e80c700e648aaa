"""What a device sends is taken as it signed it, once, and at its time; whatever else is refused changes nothing."""

import hashlib
import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import func, select

from server.identity.access_rules import SKEW_SECONDS
from server.identity.devices.repository import Device, DeviceNonce
from server.worker import purge_expired
from shared.canonical import sha256_hex
from shared.request_signature import RequestSigner
from shared.signing import new_private_key
from tests.server.actors import adapter_bytes, result
from tests.server.homes import at_once

BEAT = b'{"phase":"training"}'
JSON = {"Content-Type": "application/json"}


def sign(device, method, path, body, *, key=None, off=0.0, query=""):
    """The headers of a request, signed by a device or another key, at a time that is so many seconds off."""
    key = key or device.signer._key
    return RequestSigner(key, lambda: time.time() + off).headers(method, path, query, body) | JSON


def beat_path(lease):
    return f"/v1/leases/{lease['id']}/heartbeat"


def nonces(home):
    return home.scalar(select(func.count()).select_from(DeviceNonce))


def test_a_replay_is_refused_whatever_it_asks(device, lease, problem):
    path = beat_path(lease)
    headers = sign(device, "POST", path, BEAT)
    assert device.post(path, content=BEAT, headers=headers).status_code == 200
    problem(device.post(path, content=BEAT, headers=headers), 409, "replayed")
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    path = f"/v1/leases/{lease['id']}/adapter"
    headers = sign(device, "PUT", path, data) | {"Content-Type": "application/octet-stream"}
    assert device.put(path, content=data, headers=headers).status_code == 200
    problem(device.put(path, content=data, headers=headers), 409, "replayed")


def test_a_request_that_was_refused_is_spent_as_well(device, lease, problem):
    """Else it could be sent by somebody else at a moment at which it is not refused."""
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    body = f'{{"adapter_sha256":"{sha256_hex(data)}","result":{json.dumps(result())}}}'.encode()
    path = f"/v1/leases/{lease['id']}/complete"
    headers = sign(device, "POST", path, body)
    problem(device.post(path, content=body, headers=headers), 409, "conflict")
    assert device.upload(lease, data).status_code == 200
    problem(device.post(path, content=body, headers=headers), 409, "replayed")
    assert device.post(path, content=body, headers=JSON).status_code == 200


@pytest.mark.both_databases
def test_of_many_at_once_with_one_nonce_one_counts(fleet, device, lease):
    path = beat_path(lease)
    headers = sign(device, "POST", path, BEAT)
    actors = [fleet.actor(device.token) for _ in range(6)]
    answers = at_once(
        *(lambda number=number: actors[number].post(path, content=BEAT, headers=headers) for number in range(6))
    )
    assert sorted(answer.status_code for answer in answers) == [200] + [409] * 5


@pytest.mark.parametrize("off", [-360, 360])
def test_a_clock_that_is_off_is_told_the_time(device, lease, home, problem, off):
    path = beat_path(lease)
    headers = sign(device, "POST", path, BEAT, off=off * 7 / 9)
    assert device.post(path, content=BEAT, headers=headers).status_code == 200
    before = nonces(home)
    answer = device.post(path, content=BEAT, headers=sign(device, "POST", path, BEAT, off=off))
    document = problem(answer, 401, "clock-skew")
    server_time = datetime.fromisoformat(document["server_time"])
    assert abs(server_time - datetime.now(UTC)) < timedelta(seconds=60)
    assert document["allowed_seconds"] == 300
    assert ("ahead of" if off > 0 else "behind") in document["detail"]
    assert nonces(home) == before


def test_what_is_not_as_it_was_signed_is_refused(app, device, lease, problem):
    path = beat_path(lease)
    other = path.replace("/heartbeat", "/release")
    other_body = BEAT.replace(b"training", b"evaluating")
    for address, headers in (
        (other, sign(device, "POST", path, BEAT)),
        (path, sign(device, "PUT", path, BEAT)),
        (path + "?a=1", sign(device, "POST", path, BEAT)),
        (path, sign(device, "POST", path, BEAT, query="a=1")),
        (path, sign(device, "POST", path, BEAT, key=new_private_key())),
    ):
        problem(device.post(address, content=BEAT, headers=headers), 401, "bad-signature")
    half = sign(device, "POST", path, BEAT)
    del half["Content-Digest"]
    assert "content-digest" in problem(device.post(path, content=BEAT, headers=half), 401, "bad-signature")["detail"]
    problem(device.post(path, content=other_body, headers=sign(device, "POST", path, BEAT)), 400, "digest-mismatch")
    job = app.get(f"/v1/jobs/{lease['job']['id']}").json()
    assert (job["state"], job["progress"]) == ("training", None)


def test_a_body_that_is_not_its_digest_is_stored_nowhere(home, device, lease, problem):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    other = adapter_bytes(lease["manifest"]["manifest"]["size"], 0.25)
    path = f"/v1/leases/{lease['id']}/adapter"
    headers = sign(device, "PUT", path, data) | {"Content-Type": "application/octet-stream"}
    before = home.stored_files()
    problem(device.put(path, content=other, headers=headers), 400, "digest-mismatch")
    assert home.stored_files() == before
    assert device.upload(lease, data).status_code == 200


def test_a_foreign_device_cannot_lend_its_signature(fleet, device, lease, problem):
    stranger = fleet.device(name="other")
    path = beat_path(lease)
    for signer, bearer in ((stranger, device), (device, stranger)):
        actor = fleet.actor(bearer.token)
        problem(actor.post(path, content=BEAT, headers=sign(signer, "POST", path, BEAT)), 401, "bad-signature")


def test_uploads_and_completions_must_be_signed_and_the_rest_may_be(fleet, home, device, lease, problem):
    bare = fleet.actor(device.token)
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    body = {"adapter_sha256": sha256_hex(data), "result": result()}
    before = home.stored_files()
    problem(bare.upload(lease, data), 401, "bad-signature")
    assert device.upload(lease, data).status_code == 200
    problem(bare.post(f"/v1/leases/{lease['id']}/complete", json=body), 401, "bad-signature")
    assert bare.post(beat_path(lease), content=BEAT, headers=JSON).status_code == 200
    assert len(home.stored_files()) == len(before) + 1


def with_setting(fleet, standing, **changes):
    state = standing[0].state.mobizo
    standing[0].state.mobizo = replace(state, settings=state.settings.model_copy(update=changes))


def test_a_server_that_wants_all_signed(fleet, standing, device, lease, problem):
    with_setting(fleet, standing, signed_requests="all")
    bare = fleet.actor(device.token)
    problem(bare.post(beat_path(lease), content=BEAT, headers=JSON), 401, "bad-signature")
    problem(bare.post("/v1/leases", json={"datasets": ["movies"]}), 401, "bad-signature")
    problem(bare.post(f"/v1/leases/{lease['id']}/release"), 401, "bad-signature")
    assert device.lease()["id"] == lease["id"]
    assert device.post(f"/v1/leases/{lease['id']}/release").status_code == 200


def test_a_server_of_older_agents_asks_for_no_signature_but_looks_at_those_that_come(
    fleet, standing, device, lease, problem
):
    with_setting(fleet, standing, signed_requests="none")
    bare = fleet.actor(device.token)
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    assert bare.upload(lease, data).status_code == 200
    path = beat_path(lease)
    problem(bare.post(path, content=BEAT, headers=sign(device, "POST", path, b"")), 400, "digest-mismatch")


def test_asking_for_a_job_spends_no_nonce_and_is_still_held_to_its_signature(device, lease, home, problem):
    body = b'{"datasets":["movies"]}'
    headers = sign(device, "POST", "/v1/leases", body)
    before = nonces(home)
    for _ in range(2):
        assert device.post("/v1/leases", content=body, headers=headers).json()["id"] == lease["id"]
    assert nonces(home) == before
    problem(
        device.post("/v1/leases", content=body, headers=sign(device, "POST", "/v1/lease", body)), 401, "bad-signature"
    )


def test_a_worker_removes_the_nonces_of_signatures_that_are_over(device, lease, home, problem):
    path = beat_path(lease)
    for _ in range(3):
        device.post(path, content=BEAT, headers=JSON)
    first = home.scalar(select(func.min(DeviceNonce.expires_at)))
    assert first > datetime.now(UTC) + timedelta(seconds=2 * SKEW_SECONDS - 60)
    home.change(DeviceNonce, expires_at=datetime.now(UTC) - timedelta(seconds=1))
    headers = sign(device, "POST", path, BEAT)
    device.post(path, content=BEAT, headers=headers)
    assert nonces(home) == 4
    purge_expired(home.database)
    assert nonces(home) == 1
    problem(device.post(path, content=BEAT, headers=headers), 409, "replayed")


def test_a_device_that_enrolled_with_no_key_is_told_to_enroll_again(device, lease, home, problem):
    home.change(Device, public_key="k")
    detail = problem(device.post(beat_path(lease), content=BEAT, headers=JSON), 401, "bad-signature")["detail"]
    assert "enroll it again" in detail


def test_a_body_in_pieces_is_hashed_as_it_comes(device, lease):
    data = adapter_bytes(lease["manifest"]["manifest"]["size"])
    path = f"/v1/leases/{lease['id']}/adapter"
    headers = sign(device, "PUT", path, data) | {"Content-Type": "application/octet-stream"}
    pieces = (data[at : at + 7] for at in range(0, len(data), 7))
    answer = device.put(path, content=pieces, headers=headers)
    assert answer.json()["sha256"] == hashlib.sha256(data).hexdigest()
