"""A lease kept alive beside a run."""

import pytest

from device_agent.client import DeviceClient
from device_agent.lease import LONGEST, SHORTEST, LeaseKeeper, _interval
from shared.errors import Gone, NotFound, Unavailable
from shared.job import Progress
from tests.device_agent.double import NOW, ServerDouble


@pytest.fixture
def server(server_key, rademacher):
    with ServerDouble(server_key, lease_seconds=0.8) as double:
        double.add_job(rademacher)
        yield double


@pytest.fixture
def client(server):
    with DeviceClient(server.url, "token") as client:
        yield client


def test_heartbeats_carry_the_latest_progress(server, client):
    with LeaseKeeper(client, client.lease(["movies"])) as keeper:
        keeper.tell(Progress(phase="training", step=3, steps=9, loss=0.5))
        server.wait_for(lambda: any(beat.step == 3 for beat in server.beats))
    assert not keeper.ended
    assert server.beats[-1].loss == 0.5


def test_an_unreachable_server_is_tried_again(server, client):
    server.broken["heartbeat"] = [Unavailable(), Unavailable()]
    with LeaseKeeper(client, client.lease(["movies"])) as keeper:
        server.wait_for(lambda: len(server.beats) >= 2)
    assert not keeper.ended


@pytest.mark.parametrize("error", [Gone(), NotFound()])
def test_a_lost_lease_ends_it(server, client, error):
    server.broken["heartbeat"] = [error]
    with LeaseKeeper(client, client.lease(["movies"])) as keeper:
        assert keeper.lost.wait(10)
    assert keeper.ended
    assert not keeper.cancelled.is_set()


def test_a_cancelled_job_ends_it(server, client):
    server.stop.set()
    with LeaseKeeper(client, client.lease(["movies"])) as keeper:
        assert keeper.cancelled.wait(10)
    assert keeper.ended


def test_clocks_that_disagree_make_no_flood_and_no_silence():
    assert _interval(NOW.replace(year=2000)) == SHORTEST
    assert _interval(NOW.replace(year=2200)) == LONGEST
