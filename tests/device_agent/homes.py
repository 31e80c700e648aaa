"""Homes of agents, and a server in memory that they are enrolled with."""

import pytest

from device_agent.home import AgentHome, DeviceConfig
from shared.signing import key_id, new_private_key, public_text
from tests.device_agent.fake_server import FakeServer


@pytest.fixture
def server_key():
    return new_private_key()


@pytest.fixture
def home(tmp_path):
    """A home that has been made but not enrolled."""
    place = AgentHome(tmp_path / "home")
    place.create()
    return place


@pytest.fixture
def server(server_key):
    """A server in memory; `service` is the real one."""
    with FakeServer(server_key) as double:
        yield double


@pytest.fixture
def enrolled(home, server, server_key):
    """The home, enrolled with the server."""
    enroll(home, server.url, server_key)
    return home


def enroll(home, url, server_key, token="device-token"):
    """Puts a home in the state that enrollment leaves it in."""
    public = server_key.public_key()
    home.enroll(
        DeviceConfig(
            server=url,
            name="device",
            device_id="device-1",
            token=token,
            public_key=public_text(public),
            key_id=key_id(public),
        )
    )
