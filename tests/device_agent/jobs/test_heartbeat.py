"""A lease kept alive beside a run."""

from datetime import timedelta

import pytest

from device_agent.jobs.heartbeat import LONGEST_SECONDS, SHORTEST_SECONDS, LeaseHeartbeat, interval
from device_agent.protocol.client import DeviceClient
from shared.errors import Gone, NotFound, Unauthorized
from shared.job import Progress
from tests.device_agent.fake_server import FakeServer


@pytest.fixture
def server(server_key, rademacher):
    with FakeServer(server_key, lease_seconds=0.8) as double:
        double.add_job(rademacher)
        yield double


@pytest.fixture
def client(server):
    with DeviceClient(server.url, "token") as client:
        yield client


def test_heartbeats_carry_the_latest_progress(server, client):
    with LeaseHeartbeat(client, client.lease(["movies"])) as heartbeat:
        heartbeat.report(Progress(phase="training", step=3, steps=9, loss=0.5))
        server.wait_for(lambda: any(beat.step == 3 for beat in server.beats))
    assert not heartbeat.ended
    assert server.beats[-1].loss == 0.5


@pytest.mark.parametrize(
    ("error", "event"), [(Gone(), "lost"), (NotFound(), "lost"), (Unauthorized(), "refused"), (None, "cancelled")]
)
def test_what_the_server_answers_ends_it(server, client, error, event):
    if error is None:
        server.stop.set()
    else:
        server.broken["heartbeat"] = [error]
    with LeaseHeartbeat(client, client.lease(["movies"])) as heartbeat:
        assert getattr(heartbeat, event).wait(10)
    assert heartbeat.ended
    assert [name for name in ("lost", "refused", "cancelled") if getattr(heartbeat, name).is_set()] == [event]


@pytest.mark.parametrize("hours", [-5, 5])
def test_a_lease_goes_by_the_servers_clock(server_key, rademacher, hours):
    with FakeServer(server_key, lease_seconds=12, ahead=timedelta(hours=hours)) as server:
        server.add_job(rademacher)
        with DeviceClient(server.url, "token") as client:
            left = client.clock.seconds_until(client.lease(["movies"]).expires_at)
            assert client.clock.skew == pytest.approx(-3600 * hours, abs=2)
    # A Date has whole seconds. By its own clock the device would find hours, or none at all.
    assert left == pytest.approx(12, abs=2)
    assert SHORTEST_SECONDS < interval(left) < LONGEST_SECONDS


@pytest.mark.parametrize(
    ("left", "seconds"), [(-1e6, SHORTEST_SECONDS), (0, SHORTEST_SECONDS), (8, 2), (120, LONGEST_SECONDS)]
)
def test_heartbeats_come_four_times_in_a_lease_within_bounds(left, seconds):
    assert interval(left) == seconds
