"""Asynchronous rounds: whoever is ready counts, whatever version he began from."""

import numpy as np
import pytest

from tests.server.federation.conftest import URL

FEDBUFF = {"name": "fedbuff", "buffer_size": 2, "staleness_exponent": 1.0}


@pytest.fixture
def buffered(band):
    band.create(algorithm=FEDBUFF, automatic=True)
    band.join("alice", "bob", "carol")
    band.work()
    band.home.compile()
    return band


def finish(band, user, lease, value):
    assert band.upload(user, lease, value).status_code == 200
    answer = band.complete(user, lease)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.both_databases
def test_a_slow_device_counts_in_a_later_round_and_weighs_less(buffered):
    slow = buffered.lease("carol")
    buffered.train("alice", 1.0)
    assert buffered.train("bob", 3.0)["round"] == 1
    assert buffered.round(1)["state"] == "aggregating"
    assert (buffered.round(2)["state"], buffered.round(2)["members"]) == ("open", 3)
    buffered.work()
    np.testing.assert_array_equal(buffered.b("v1"), np.float32(2.0))
    assert finish(buffered, "carol", slow, 8.0)["round"] == 2
    carol = buffered.parts(2)["carol"]
    assert (carol["staleness"], carol["state"]) == (1, "counted")
    fresh = buffered.lease("alice")
    assert fresh["start"]["manifest"]["version"] == 1
    finish(buffered, "alice", fresh, 6.0)
    buffered.work()
    # From 2: (8 / 2 + 4) / 2 more, as carol's update began one version before.
    np.testing.assert_array_equal(buffered.b("v2"), np.float32(2 + (8 * 0.5 + (6 - 2)) / 2))
    assert buffered.round(2)["version"] == 2


def test_two_rounds_that_are_full_make_their_versions_in_order(buffered):
    buffered.join("dave")
    buffered.worker.look_around()
    slow = {user: buffered.lease(user) for user in ("carol", "dave")}
    buffered.train("alice", 1.0)
    buffered.train("bob", 3.0)
    finish(buffered, "carol", slow["carol"], 8.0)
    assert finish(buffered, "dave", slow["dave"], 4.0)["round"] == 2
    assert buffered.parts(2)["carol"]["staleness"] == 0
    assert [buffered.round(number)["state"] for number in (1, 2, 3)] == ["aggregating", "aggregating", "open"]
    buffered.work()
    np.testing.assert_array_equal(buffered.b("v1"), np.float32(2.0))
    np.testing.assert_array_equal(buffered.b("v2"), np.float32(2 + (8 + 4) / 2))
    assert buffered.app.get("/v1/adapters/readers/revisions/v2").json()["parent"]["version"] == 1


def test_who_joins_takes_part_at_once(buffered):
    assert buffered.round(1)["members"] == 3
    buffered.join("dave")
    assert buffered.round(1)["members"] == 4
    buffered.worker.look_around()
    assert buffered.lease("dave") is not None


def test_a_version_that_waits_for_a_person_holds_the_next_jobs_back(buffered, operator):
    assert operator.put("/v1/adapters/readers/rule", json={"rule": {"automatic": False}}).status_code == 200
    buffered.train_all(alice=1.0, bob=3.0)
    assert buffered.lease("alice") is None
    assert operator.post("/v1/adapters/readers/versions/1/approve").status_code == 200
    buffered.work()
    assert buffered.lease("alice")["start"]["manifest"]["version"] == 1


def test_closed_by_a_person_nobody_goes_on(buffered):
    slow = buffered.lease("carol")
    buffered.train("alice", 1.0)
    assert buffered.app.post(f"{URL}/rounds/1/close").json()["state"] == "abandoned"
    answer = buffered.devices["carol"].post(f"/v1/leases/{slow['id']}/heartbeat", json={"phase": "training"})
    assert answer.json()["stop"]
    buffered.work()
    assert buffered.app.get(URL).json()["rounds"] == 1
