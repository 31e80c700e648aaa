"""Fixtures of the client's tests: the test server of tests/server, its command, and a configuration directory."""

import pytest
from typer.testing import CliRunner

from mobizo.cli import app as cli
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


@pytest.fixture
def command(fleet, app, monkeypatch):
    """Runs `mobizo` with an app's token; returns what it printed, or with another exit code its errors."""
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*arguments, exit_code=0, stdin=None):
        result = CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)
        assert result.exit_code == exit_code, result.output
        assert "Traceback" not in result.output
        return result.stdout if exit_code == 0 else result.stderr

    return command
