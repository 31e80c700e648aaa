"""Asynchronous rounds: whoever is ready counts, whatever version he began from."""

import numpy as np
import pytest

from tests.server.federation.conftest import URL

FEDBUFF = {"name": "fedbuff", "buffer_size": 2, "staleness_exponent": 1.0}


@pytest.fixture
def buffered_band(band):
    band.create("alice", "bob", "carol", algorithm=FEDBUFF, automatic=True)
    band.work()
    band.home.compile()
    return band


@pytest.mark.both_databases
def test_a_slow_device_counts_in_a_later_round_and_weighs_less(buffered_band):
    slow = buffered_band.lease("carol")
    buffered_band.train("alice", 1.0)
    assert buffered_band.train("bob", 3.0)["round"] == 1
    assert buffered_band.round(1)["state"] == "aggregating"
    assert (buffered_band.round(2)["state"], buffered_band.round(2)["members"]) == ("open", 3)
    buffered_band.work()
    np.testing.assert_array_equal(buffered_band.b("v1"), np.float32(2.0))
    assert buffered_band.finish("carol", slow, 8.0)["round"] == 2
    carol = buffered_band.parts(2)["carol"]
    assert (carol["staleness"], carol["state"]) == (1, "counted")
    fresh = buffered_band.lease("alice")
    assert fresh["start"]["manifest"]["version"] == 1
    buffered_band.finish("alice", fresh, 6.0)
    buffered_band.work()
    # From 2: (8 / 2 + 4) / 2 more, as carol's update began one version before.
    np.testing.assert_array_equal(buffered_band.b("v2"), np.float32(2 + (8 * 0.5 + (6 - 2)) / 2))
    assert buffered_band.round(2)["version"] == 2


def test_two_rounds_that_are_full_make_their_versions_in_order(buffered_band):
    buffered_band.join("dave")
    buffered_band.sweep()
    slow = {user: buffered_band.lease(user) for user in ("carol", "dave")}
    buffered_band.train("alice", 1.0)
    buffered_band.train("bob", 3.0)
    buffered_band.finish("carol", slow["carol"], 8.0)
    assert buffered_band.finish("dave", slow["dave"], 4.0)["round"] == 2
    assert buffered_band.parts(2)["carol"]["staleness"] == 0
    assert [buffered_band.round(number)["state"] for number in (1, 2, 3)] == ["aggregating", "aggregating", "open"]
    buffered_band.work()
    np.testing.assert_array_equal(buffered_band.b("v1"), np.float32(2.0))
    np.testing.assert_array_equal(buffered_band.b("v2"), np.float32(2 + (8 + 4) / 2))
    assert buffered_band.app.get("/v1/adapters/readers/revisions/v2").json()["parent"]["version"] == 1


def test_who_joins_takes_part_at_once(buffered_band):
    assert buffered_band.round(1)["members"] == 3
    buffered_band.join("dave")
    assert buffered_band.round(1)["members"] == 4
    buffered_band.sweep()
    assert buffered_band.lease("dave") is not None


def test_closed_by_a_person_nobody_goes_on(buffered_band):
    slow = buffered_band.lease("carol")
    buffered_band.train("alice", 1.0)
    assert buffered_band.app.post(f"{URL}/rounds/1/close").json()["state"] == "abandoned"
    answer = buffered_band.devices["carol"].post(f"/v1/leases/{slow['id']}/heartbeat", json={"phase": "training"})
    assert answer.json()["stop"]
    buffered_band.work()
    assert buffered_band.app.get(URL).json()["rounds"] == 1
