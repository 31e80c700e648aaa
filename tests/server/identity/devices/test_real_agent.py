"""The agent's own client and what the server holds it to."""

from datetime import UTC, datetime, timedelta

import pytest

from device_agent.protocol.client import DeviceClient, ServerClock
from shared.errors import BadSignature
from shared.job import Progress
from shared.protocol import LeaseRequest
from shared.signing import new_private_key


def clock(hours):
    """Of a device whose own clock is off, before it has heard from the server."""
    return ServerClock(local=lambda: datetime.now(UTC) + timedelta(hours=hours))


@pytest.mark.parametrize("hours", [-7, 7])
def test_a_device_whose_clock_is_off_is_heard_by_the_servers(fleet, device, lease, hours):
    """Also by a request that is tried only once, such as a heartbeat: what is refused for its time has done nothing."""
    with DeviceClient(fleet.url, device.token, device.signer._key) as client:
        client.clock = clock(hours)
        assert not client.heartbeat(lease["id"], Progress(phase="training")).stop
        assert client.lease(LeaseRequest(datasets=["movies"])).id == lease["id"]
        assert abs(client.clock.skew - 3600 * hours) < 60


def test_a_device_that_lost_its_key_is_told_to_enroll_again(fleet, device, lease):
    with (
        DeviceClient(fleet.url, device.token, new_private_key()) as client,
        pytest.raises(BadSignature, match="enroll this device again"),
    ):
        client.heartbeat(lease["id"], Progress(phase="training"))
