"""The server's own test server, for its client."""

import pytest

from tests.server.conftest import app, database_url, device, fleet, home, home_template, operator, standing

__all__ = ["app", "database_url", "device", "fleet", "home", "home_template", "operator", "standing"]


@pytest.fixture(scope="session")
def database_kind():
    """A client cannot tell which one it is."""
    return "sqlite"
