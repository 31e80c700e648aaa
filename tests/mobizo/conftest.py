"""The server's own test server, for its client."""

import pytest

from tests.server.conftest import app, database_url, device, fleet, home, home_template, operator, standing

__all__ = ["app", "database_url", "device", "fleet", "home", "home_template", "operator", "standing"]


@pytest.fixture(scope="session")
def database_kind():
    """A client cannot tell which one it is."""
    return "sqlite"


@pytest.fixture(autouse=True)
def config(monkeypatch, tmp_path):
    """A user's configuration of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "mobizo"
