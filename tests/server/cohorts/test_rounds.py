"""Rounds over HTTP: opened, trained, averaged, published; what ends one, and what follows."""

import numpy as np

URL = "/v1/cohorts/readers"


def test_two_rounds_of_federated_averaging(band):
    band.create()
    band.join("alice", "bob", "carol")
    opened = band.open()
    assert (opened["number"], opened["state"], opened["members"], opened["start_version"]) == (1, "open", 3, None)
    assert band.train("alice", 1.0) == {"cohort": "readers", "round": 1, "updates": 1}
    band.train("bob", 2.0)
    band.work()
    assert band.round()["state"] == "open"
    band.train("carol", 4.5)
    assert band.round()["state"] == "aggregating"
    band.work()
    published = band.round()
    assert (published["state"], published["version"], published["updates"]) == ("published", 1, 3)
    np.testing.assert_array_equal(band.b(), np.float32(2.5))
    second = band.open()
    assert (second["number"], second["start_version"]) == (2, 1)
    for user, value in (("alice", 3.5), ("bob", 2.5), ("carol", 1.5)):
        band.train(user, value)
    band.work()
    assert band.round(2)["version"] == 2
    np.testing.assert_array_equal(band.b(), np.float32(2.5))
    version = band.app.get("/v1/adapters/readers/revisions/v2").json()
    assert (version["job_id"], version["device_id"], version["state"]) == (None, None, "approved")
    assert (version["parent"]["version"], version["cohort"]["round"], version["cohort"]["updates"]) == (1, 2, 3)
