"""Versions made the way that devices make them."""

import pytest

URL = "/v1/adapters/alice-movies"


@pytest.fixture
def version(device, lease):
    """Version 1 of the adapter, which `device` trained."""
    return device.finish(lease)


@pytest.fixture
def publish(fleet, app, device):
    """Trains one more version of an adapter; what the device is told of it."""

    def publish_version(value=0.5, *, job=None, **changes):
        fleet.ready_job(app, **(job or {}))
        return device.finish(device.lease(), value, **changes)

    return publish_version


@pytest.fixture
def decide(app):
    """Asks for something about an adapter version; what is answered, which must be 200."""

    def request(method, path, body=None, url=URL, **headers):
        options = {} if body is None else {"json": body}
        answer = app.request(method, f"{url}{path}", headers=headers, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return request
