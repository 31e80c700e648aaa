"""A server that may reach receivers on the loopback interface, and a worker in this process."""

from datetime import timedelta

import pytest

from server.webhooks import delivery
from server.worker import create_worker
from tests.server.homes import drain
from tests.server.webhooks.receiver import receiving


@pytest.fixture
def home(home):
    home.settings = home.settings.model_copy(update={"webhook_networks": "127.0.0.0/8"})
    return home


@pytest.fixture
def receiver():
    with receiving() as new_receiver:
        yield new_receiver


@pytest.fixture
def work(home, monkeypatch):
    """Sends all messages that wait, and repeats failed ones, as if the pauses had passed."""
    monkeypatch.setattr(delivery, "RETRY_SECONDS", (0,) * len(delivery.RETRY_SECONDS))
    monkeypatch.setattr(delivery, "FIRST_PAUSE", timedelta(0))
    worker = create_worker(home.settings, home.database)
    worker.register()
    return lambda: drain(worker)
