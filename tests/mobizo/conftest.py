"""Fixtures of the client's tests: the test server of tests/server, and a configuration directory."""

import pytest

from tests.server.conftest import app, database_url, device, fleet, home, home_template, operator, standing

__all__ = ["app", "database_url", "device", "fleet", "home", "home_template", "operator", "standing"]


@pytest.fixture(scope="session")
def database_kind():
    """SQLite, because the client behaves the same with every database."""
    return "sqlite"


@pytest.fixture(autouse=True)
def config(monkeypatch, tmp_path):
    """Gives each test an empty configuration directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "mobizo"
