"""Updates that may not count: each is refused by its rule, and changes nothing."""

import numpy as np
import pytest

from shared.canonical import sha256_hex
from tests.server.conftest import result
from tests.server.federation.conftest import URL


@pytest.fixture
def opened(band):
    """Alice's lease in an open round of three."""
    band.create(norm_limit=100.0)
    band.join("alice", "bob", "carol")
    band.open()
    return band.lease("alice")


def size_of(lease):
    return lease["manifest"]["manifest"]["size"]


def test_of_who_is_no_member(band, opened, fleet, problem):
    stranger = fleet.device(name="stranger")
    assert stranger.lease("movies", capabilities={"cohorts": True}) is None
    band.devices["stranger"] = stranger
    problem(band.upload("stranger", opened, 1.0), 404, "not-found")
    answer = band.app.post("/v1/jobs", json={**opened["job"]["request"], "user": "mallory", "device": None})
    assert "belongs to a cohort" in problem(answer, 409, "conflict")["detail"]
    body = {**opened["job"]["request"], "adapter": "mine", "round": {"cohort": "readers", "number": 1}}
    problem(band.app.post("/v1/jobs", json=body), 422, "invalid-request")
    assert band.round()["updates"] == 0


def test_of_who_has_left(band, opened, problem):
    assert band.upload("alice", opened, 1.0).status_code == 200
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    problem(band.complete("alice", opened), 403, "not-a-member")
    problem(band.upload("alice", opened, 1.0), 403, "not-a-member")
    band.train("bob", 2.0)
    band.train("carol", 4.0)
    band.work()
    np.testing.assert_array_equal(band.b(), np.float32(3.0))
    assert band.parts()["alice"]["state"] == "left"


def test_of_who_leaves_after_his_update_counted(band, opened):
    band.train("alice", 1.5)
    band.train("bob", 2.0)
    assert band.app.delete(f"{URL}/members/alice").status_code == 204
    assert band.round()["updates"] == 1
    band.train("carol", 4.0)
    band.work()
    np.testing.assert_array_equal(band.b(), np.float32(3.0))


def test_twice(band, opened, problem):
    assert band.upload("alice", opened, 1.0).status_code == 200
    first = band.complete("alice", opened)
    assert band.complete("alice", opened).json() == first.json()
    assert band.round()["updates"] == 1
    body = {"adapter_sha256": sha256_hex(b"another"), "result": result()}
    problem(band.devices["alice"].post(f"/v1/leases/{opened['id']}/complete", json=body), 409, "conflict")
    problem(band.upload("alice", opened, 2.0), 410, "lease-ended")
    assert band.lease("alice") is None


def test_with_a_huge_norm(band, opened, problem):
    size = size_of(opened)
    told = problem(band.upload("alice", opened, 101 / np.sqrt(size)), 422, "invalid-update")
    np.testing.assert_allclose((told["norm"], told["limit"]), (101, 100), rtol=1e-5)
    problem(band.upload("alice", opened, 1e30), 422, "invalid-upload")
    assert band.upload("alice", opened, 99 / np.sqrt(size)).status_code == 200
    assert band.complete("alice", opened).status_code == 200
    np.testing.assert_allclose(band.parts()["alice"]["norm"], 99, rtol=1e-5)


def test_the_norm_is_of_what_changed_since_the_start(band, opened, problem):
    step = 90 / np.sqrt(size_of(opened))
    for user in ("alice", "bob", "carol"):
        band.train(user, step)
    band.work()
    band.open()
    lease = band.lease("alice")
    problem(band.upload("alice", lease, -step), 422, "invalid-update")
    assert band.upload("alice", lease, 2 * step).status_code == 200


def test_not_finite(band, opened, problem):
    flat = np.zeros(size_of(opened), np.float32)
    for value in (np.nan, np.inf, -np.inf):
        flat[-1] = value
        assert "finite" in problem(band.upload("alice", opened, flat), 422, "invalid-upload")["detail"]


def test_with_another_a(band, opened, problem):
    told = problem(band.upload("alice", opened, 1.0, a_sha256="0" * 64), 422, "cohort-mismatch")
    assert told["update"] == "0" * 64
    assert told["cohort"] == band.view["a_sha256"] == opened["manifest"]["manifest"]["a_sha256"]
    assert told["update"] in told["detail"]


def test_with_no_word_of_its_a(band, opened, problem):
    problem(band.devices["alice"].upload(opened), 422, "cohort-mismatch")


def test_of_another_d(band, opened, problem):
    flat = np.zeros(size_of(opened) + 1, np.float32)
    assert str(size_of(opened)) in problem(band.upload("alice", opened, flat), 422, "invalid-upload")["detail"]


def test_for_a_round_that_has_ended(band, opened, problem):
    assert band.upload("alice", opened, 1.0).status_code == 200
    assert band.app.post(f"{URL}/rounds/1/close").json()["state"] == "abandoned"
    problem(band.complete("alice", opened), 410, "round-closed")
    problem(band.upload("alice", opened, 1.0), 410, "round-closed")


def test_of_no_examples_where_they_are_the_weight(band, problem):
    band.create(weights="examples")
    band.join("alice", "bob")
    band.open()
    lease = band.lease("alice")
    band.upload("alice", lease, 1.0)
    problem(band.complete("alice", lease, train_examples=0), 422, "invalid-update")
    assert band.complete("alice", lease, train_examples=1).status_code == 200


def test_files_are_forgotten_when_the_round_has_ended(band, opened):
    from server.federation.models import MemberUpdate

    for user in ("alice", "bob", "carol"):
        band.train(user, 1.0)
    with band.home.database.reading() as session:
        assert all(part.sha256 for part in session.query(MemberUpdate))
    band.work()
    with band.home.database.reading() as session:
        assert not any(part.sha256 for part in session.query(MemberUpdate))
