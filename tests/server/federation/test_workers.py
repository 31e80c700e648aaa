"""Who makes a round's version: real worker processes, killed in the middle, and claims that are lost."""

import os

import numpy as np
import pytest
from sqlalchemy import select

from server.federation.aggregation import AggregationHandler
from server.federation.arithmetic import make_version
from server.federation.models import CohortRound, MemberUpdate
from tests.server.federation.conftest import URL
from tests.server.homes import Workers, eventually


@pytest.fixture
def full(band):
    """A round of three whose version is to be made."""
    band.begin("alice", "bob", "carol")
    for user, value in (("alice", 1.0), ("bob", 2.0), ("carol", 6.0)):
        band.train(user, value)
    return band


def row(home):
    return home.scalar(select(CohortRound))


def path_of(home, sha256):
    return next(path for path in home.settings.artifacts_path.rglob(sha256))


@pytest.mark.both_databases
def test_killed_in_the_middle_it_is_made_again_and_counts_nobody_twice(home, full, start_worker):
    path = path_of(home, home.scalars(select(MemberUpdate.sha256).order_by(MemberUpdate.number))[-1])
    data = path.read_bytes()
    path.unlink()
    os.mkfifo(path)  # whoever reads it waits
    first = start_worker(compile_lease_seconds=2)
    eventually(lambda: home.task(row(home).id))
    first.kill()
    first.join()
    assert row(home).state == "aggregating"
    path.unlink()
    path.write_bytes(data)
    start_worker(compile_lease_seconds=2)
    eventually(lambda: full.round()["state"] == "published")
    np.testing.assert_array_equal(full.b(), np.float32(3.0))
    assert full.app.get("/v1/adapters/readers").json()["versions"] == 1
    assert (home.task(row(home).id), row(home).updates) == (None, 3)


class Aggregators(Workers):
    """Two workers that make rounds' versions."""

    def handler(self):
        return AggregationHandler(self.home.settings, self.home.database, self.home.artifacts)

    def claim(self, name):
        return super().claim(name, self.handler())

    def publish(self, name, claim):
        return self.do(name, self.handler(), "end", claim, make_version(self.home.artifacts, claim.order))


@pytest.fixture
def workers(home):
    return Aggregators(home, "one", "two")


def test_who_leaves_while_it_is_made_does_not_count(full, workers):
    first = workers.claim("one")
    assert full.app.delete(f"{URL}/members/carol").status_code == 204
    assert not workers.publish("one", first)
    again = workers.claim("one")
    assert len(again.order.updates) == 2
    assert workers.publish("one", again)
    np.testing.assert_array_equal(full.b(), np.float32(1.5))
    assert full.round()["updates"] == 2


def test_who_leaves_while_it_is_made_may_take_the_quorum(full, workers):
    first = workers.claim("one")
    for user in ("carol", "bob"):
        assert full.app.delete(f"{URL}/members/{user}").status_code == 204
    assert full.round()["state"] == "abandoned"
    assert not workers.publish("one", first)


def test_killed_every_time_it_is_abandoned(home, full, workers):
    for _ in range(home.settings.compile_attempts):
        assert workers.claim("one") is not None
        workers.lose("one", workers.handler())
    assert full.round()["state"] == "abandoned"
    assert "killed in every attempt" in full.round()["why"]
    assert workers.claim("one") is None


def test_a_damaged_update_ends_the_round_and_says_whose_it_was(home, full):
    path = path_of(home, home.scalars(select(MemberUpdate.sha256).order_by(MemberUpdate.number))[0])
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-4])
    full.work()
    assert full.round()["state"] == "abandoned"
    assert full.round()["why"].startswith("alice: ")
    assert full.app.get("/v1/adapters/readers").json()["versions"] == 0


def test_aggregators_that_choose(band):
    band.begin("alice", "bob", "carol", aggregator={"name": "median"}, quorum=3)
    band.train_all(alice=1.0, bob=2.0, carol=60.0)
    np.testing.assert_array_equal(band.b(), np.float32(2.0))
    origin = band.app.get("/v1/adapters/readers/revisions/main").json()["cohort"]
    assert (origin["aggregator"]["name"], origin["updates"]) == ("median", 3)
