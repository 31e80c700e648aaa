"""A daemon of any home, and the server that it asks."""

import pytest

from device_agent.daemon.daemon import Daemon
from device_agent.daemon.reporting import Display
from tests.device_agent.conftest import enroll
from tests.device_agent.fake_server import FakeServer


@pytest.fixture
def server(server_key):
    with FakeServer(server_key) as double:
        yield double


@pytest.fixture
def make(dataset, engines):
    """A daemon of any home."""
    made = []

    def make(home):
        display = Display(home, live=False)
        display.__enter__()
        made.append(Daemon(home, {"movies": dataset}, display, pause_seconds=0.1, engines=engines))
        return made[-1]

    yield make
    for daemon in made:
        daemon.stop()


@pytest.fixture
def daemon(make, home, server, server_key):
    enroll(home, server.url, server_key)
    return make(home)
