"""Updates that may not count: each is refused by its rule, and changes nothing."""

import numpy as np
import pytest

from shared.canonical import sha256_hex
from tests.server.actors import result
from tests.server.federation.conftest import URL


@pytest.fixture
def round_lease(band):
    """Alice's lease in an open round of three."""
    band.begin("alice", "bob", "carol", norm_limit=100.0)
    return band.lease("alice")


def size_of(lease):
    return lease["manifest"]["manifest"]["size"]


def test_of_who_is_no_member(band, round_lease, fleet, problem):
    stranger = fleet.device(name="stranger")
    assert stranger.lease("movies", capabilities={"cohorts": True}) is None
    band.devices["stranger"] = stranger
    problem(band.upload("stranger", round_lease, 1.0), 404, "not-found")
    answer = band.app.post("/v1/jobs", json={**round_lease["job"]["request"], "user": "mallory", "device": None})
    assert "belongs to a cohort" in problem(answer, 409, "conflict")["detail"]
    body = {**round_lease["job"]["request"], "adapter": "mine", "round": {"cohort": "readers", "number": 1}}
    problem(band.app.post("/v1/jobs", json=body), 422, "invalid-request")
    assert band.round()["updates"] == 0


def test_of_who_has_left(band, round_lease, problem):
    assert band.upload("alice", round_lease, 1.0).status_code == 200
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    problem(band.complete("alice", round_lease), 403, "not-a-member")
    problem(band.upload("alice", round_lease, 1.0), 403, "not-a-member")
    band.train_all(bob=2.0, carol=4.0)
    np.testing.assert_array_equal(band.b(), np.float32(3.0))
    assert band.parts()["alice"]["state"] == "left"


def test_of_who_leaves_after_his_update_counted(band, round_lease):
    band.train("alice", 1.5)
    band.train("bob", 2.0)
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    assert band.round()["updates"] == 1
    band.train_all(carol=4.0)
    np.testing.assert_array_equal(band.b(), np.float32(3.0))


def test_twice(band, round_lease, problem):
    first = band.finish("alice", round_lease, 1.0)
    assert band.complete("alice", round_lease).json() == first
    assert band.round()["updates"] == 1
    body = {"adapter_sha256": sha256_hex(b"another"), "result": result()}
    problem(band.devices["alice"].post(f"/v1/leases/{round_lease['id']}/complete", json=body), 409, "conflict")
    problem(band.upload("alice", round_lease, 2.0), 410, "lease-ended")
    assert band.lease("alice") is None


def test_with_a_huge_norm(band, round_lease, problem):
    size = size_of(round_lease)
    refusal = problem(band.upload("alice", round_lease, 101 / np.sqrt(size)), 422, "invalid-update")
    np.testing.assert_allclose((refusal["norm"], refusal["limit"]), (101, 100), rtol=1e-5)
    problem(band.upload("alice", round_lease, 1e30), 422, "invalid-upload")
    band.finish("alice", round_lease, 99 / np.sqrt(size))
    np.testing.assert_allclose(band.parts()["alice"]["norm"], 99, rtol=1e-5)


def test_the_norm_is_of_what_changed_since_the_start(band, round_lease, problem):
    step = 90 / np.sqrt(size_of(round_lease))
    band.train_all(alice=step, bob=step, carol=step)
    band.open()
    lease = band.lease("alice")
    problem(band.upload("alice", lease, -step), 422, "invalid-update")
    assert band.upload("alice", lease, 2 * step).status_code == 200


def test_with_another_a(band, round_lease, problem):
    refusal = problem(band.upload("alice", round_lease, 1.0, a_sha256="0" * 64), 422, "cohort-mismatch")
    assert refusal["update"] == "0" * 64
    assert refusal["cohort"] == band.view["a_sha256"] == round_lease["manifest"]["manifest"]["a_sha256"]
    assert refusal["update"] in refusal["detail"]
    problem(band.devices["alice"].upload(round_lease), 422, "cohort-mismatch")  # which says nothing of its A


def test_for_a_round_that_has_ended(band, round_lease, problem):
    assert band.upload("alice", round_lease, 1.0).status_code == 200
    assert band.app.post(f"{URL}/rounds/1/close").json()["state"] == "abandoned"
    problem(band.complete("alice", round_lease), 410, "round-closed")
    problem(band.upload("alice", round_lease, 1.0), 410, "round-closed")


def test_of_no_examples_where_they_are_the_weight(band, problem):
    band.begin("alice", "bob", weights="examples")
    lease = band.lease("alice")
    band.upload("alice", lease, 1.0)
    problem(band.complete("alice", lease, train_examples=0), 422, "invalid-update")
    assert band.complete("alice", lease, train_examples=1).status_code == 200
