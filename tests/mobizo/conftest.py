"""Fixtures of the client's tests: the test server of tests/server, its command, and a configuration directory."""

import pytest
from typer.testing import CliRunner

from mobizo import Client
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


def run(*arguments, exit_code=0, stdin=None, stderr=False):
    """Runs `mobizo`; returns what it printed, or its errors if another exit code is expected or `stderr` is set."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == exit_code, result.output
    assert "Traceback" not in result.output
    return result.stderr if exit_code or stderr else result.stdout


@pytest.fixture
def client(fleet, app):
    """The Python client with an app's token."""
    with Client(fleet.url, app.token) as client:
        yield client


@pytest.fixture
def command(fleet, app, monkeypatch):
    """`run` with an app's token."""
    monkeypatch.setenv("MOBIZO_SERVER", fleet.url)
    monkeypatch.setenv("MOBIZO_TOKEN", app.token)
    monkeypatch.setenv("COLUMNS", "200")
    return run


@pytest.fixture
def operator_command(command, operator, monkeypatch):
    """`run` with an operator's token."""
    monkeypatch.setenv("MOBIZO_TOKEN", operator.token)
    return run
